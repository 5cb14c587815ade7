"""tools/bench_cpu.py --products: peers' products are right, and all are timed in turn."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import gguf
import pytest
import torch

import cutlass_ops as co

ROOT = Path(__file__).parent.parent
NAMES = (
    "ours A8",
    "ours A16",
    "ours A16 bf16",
    "ONNX Runtime A8",
    "ONNX Runtime A16",
    "OpenVINO A8",
    "OpenVINO A16 bf16",
    "llama.cpp Q4_0 A8",
    "torch int4pack A16 bf16",
    "torch dense A16",
    "torch dense A16 bf16",
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_cpu

    torch.manual_seed(0)
    return bench_cpu


@pytest.fixture
def peers(bench: ModuleType) -> ModuleType:
    module: ModuleType = bench.cpu_peers
    return module


@pytest.mark.parametrize("name", NAMES)
def test_every_peer_multiplies_by_every_copy(peers: ModuleType, name: str) -> None:
    assert tuple(peers.PEERS) == NAMES
    weight = peers.random_weight(128, 256, 32)
    try:
        prepare = peers.PEERS[name].make(peers.copies(weight, 3), threads=1)
    except (ImportError, OSError) as error:
        pytest.skip(f"{name}: {error}")
    for m in (1, 5):
        x = torch.randn(m, 256)
        run = prepare(x)
        assert len(run()) == 3
        peers.check(name, run, x @ co.dequantize(weight, torch.float32).t())


def test_a_wrong_product_is_refused(peers: ModuleType) -> None:
    weight = peers.random_weight(64, 64, 32)
    x = torch.randn(2, 64)
    expected = x @ co.dequantize(weight, torch.float32).t()
    peers.check("ours A16", lambda: [expected, expected.roll(1, 1)], expected)
    wrong = "ours A16 has a relative error of .* in copy 1 for M = 2, over 1e-05"
    with pytest.raises(ValueError, match=wrong):
        peers.check("ours A16", lambda: [expected, expected], expected)
    with pytest.raises(ValueError, match="relative error of nan"):
        peers.check("ours A16", lambda: [expected * float("nan")], expected)


def test_blocks_of_q4_0_are_those_of_gguf(peers: ModuleType) -> None:
    weight = peers.random_weight(64, 96, 32)
    blocks = peers.q4_0(weight)
    assert blocks.shape == (64, 3, 18)
    read = gguf.quants.dequantize(blocks.flatten(1).numpy(), gguf.GGMLQuantizationType.Q4_0)
    assert torch.equal(torch.from_numpy(read), co.dequantize(weight, torch.float32))


def test_copies_exceed_the_caches(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def make(weights: list[co.QuantizedWeight], threads: int) -> None:
        seen.append((sum(weight.codes.numel() for weight in weights), threads))

    monkeypatch.setattr(
        peers, "PEERS", {"four": peers.Peer(make, 0.0), "dense": peers.Peer(make, 0.0, bits=32)}
    )
    found = peers.installed(peers.random_weight(64, 64, 32), 2, cold_bytes=100_000)
    assert {name: count for name, (_, count) in found.items()} == {"four": 49, "dense": 7}
    assert seen == [(49 * 64 * 64, 2), (7 * 64 * 64, 2)]
    found = peers.installed(peers.random_weight(64, 64, 32), 1, cold_bytes=1)
    assert {count for _, count in found.values()} == {2}


def test_a_missing_peer_is_skipped_and_logged(
    bench: ModuleType,
    peers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def missing(weights: list[co.QuantizedWeight], threads: int) -> None:
        raise ModuleNotFoundError("No module named 'onnx'")

    own = {name: peers.PEERS[name] for name in ("ours A8", "torch dense A16")}
    other = {
        "ONNX Runtime A8": peers.Peer(missing, 1.0),
        "groups of 64": peers.Peer(missing, 1.0, group_size=64),
    }
    monkeypatch.setattr(peers, "PEERS", own | other)
    monkeypatch.setattr(bench, "cold_bytes", lambda: 0)
    monkeypatch.setattr(bench, "REST_SECONDS", 0)
    threads = torch.get_num_threads()
    try:
        rows = list(bench.measure_products(peers.random_weight(64, 64, 32), 1, [1, 2], 1))
    finally:
        torch.set_num_threads(threads)
    assert [(row["group_size"], row["threads"], row["m"]) for row in rows] == [
        (32, 1, 1),
        (32, 1, 2),
    ]
    assert all(list(row["us"]) == list(own) for row in rows)
    assert capsys.readouterr().out == "ONNX Runtime A8 is left out: No module named 'onnx'\n"


def test_versions_are_those_of_the_peers(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peers.versions(["ours A8", "torch dense A16"]) == {}
    monkeypatch.setattr(peers, "PEERS", {"a": peers.Peer(None, 0.0, package="pytest")})
    assert peers.versions(["a"]) == {"pytest": pytest.__version__}


def test_a_round_has_every_peer_and_the_median_is_taken(bench: ModuleType) -> None:
    now, calls = 0.0, []

    def peer(name: str, times: list[float]) -> None:
        nonlocal now
        calls.append(name)
        now += times.pop(0)

    slow, fast = [9.0, 3.0, 4.0], [1.0, 2.0, 8.0]
    passes = {"slow": lambda: peer("slow", slow), "fast": lambda: peer("fast", fast)}
    assert bench.medians(passes, 3, lambda: now, rest=0) == {"slow": 4.0, "fast": 2.0}
    assert calls == ["slow", "fast"] * 3
