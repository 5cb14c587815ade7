"""compressed-tensors directories against golden words, plain loops and the format's own writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from llm_checkpoints import check, ct_config, ct_weights, expected, randint, randn, save, words
from torch import Tensor

import cutlass_ops
from cutlass_ops import CheckpointError, load_checkpoint
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed
from cutlass_ops.reference import dequantize_weight
from cutlass_ops.weights.reorder import reorder


def test_compressed_tensors_golden_word(tmp_path: Path) -> None:
    """Codes -8 .. -1 are stored as 0 .. 7; K = 5 leaves the rest of the word to anything."""
    tensors = {
        "m.weight_packed": torch.tensor([[0x76543210]], dtype=torch.int32),
        "m.weight_shape": torch.tensor([1, 5]),
        "m.weight_scale": torch.full((1, 1), 0.5),
    }
    checkpoint = load_checkpoint(save(tmp_path, tensors, ct_config({"weights": ct_weights()})))
    assert checkpoint["m"].codes.tolist() == [[0, 1, 2, 3, 4]]
    assert dequantize_weight(checkpoint["m"], torch.float32).tolist() == [
        [-4.0, -3.5, -3.0, -2.5, -2.0]
    ]
    assert checkpoint["m"].symmetric


def scheme(weights: dict[str, Any], **more: Any) -> Any:
    ct = import_or_skip("compressed_tensors.quantization")
    return ct.QuantizationScheme(targets=["Linear"], weights=ct.QuantizationArgs(**weights), **more)


def ct_write(
    kind: str, weight: Tensor, weights: dict[str, Any], dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one module as the package compresses it, and the values that the package
    reads from them.
    """
    made = scheme(weights)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    n, k = weight.shape
    size = {"group": weights.get("group_size") or k, "channel": k, "tensor": k}[weights["strategy"]]
    blocks = torch.nn.functional.pad(weight, (0, -k % size)).view(n, -1, size)
    if weights["strategy"] == "tensor":
        blocks = weight.view(1, 1, -1)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), made.weights)
    state = {
        "weight": weight.to(dtype),
        "weight_scale": scale.to(dtype),
        "weight_zero_point": zero.to(torch.int8),
    }
    if weights["strategy"] == "tensor":
        state = state | {
            name: state[name].view(1) for name in ("weight_scale", "weight_zero_point")
        }
    compressor = BaseCompressor.get_value_from_registry(kind)
    compressed = compressor.compress(state, made)
    values = compressor.decompress(dict(compressed), made)["weight"]
    return {f"m.{name}": value for name, value in compressed.items()}, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape", "weights"),
    [
        ("pack-quantized", (24, 128), ct_weights()),
        # zero points of 20 rows do not fill their word
        ("pack-quantized", (20, 192), ct_weights(group_size=64)),
        # nor do codes of 36 columns
        ("pack-quantized", (5, 36), ct_weights(strategy="channel", group_size=None)),
        ("pack-quantized", (8, 128), ct_weights(num_bits=8, group_size=128)),
        ("pack-quantized", (6, 70), ct_weights(num_bits=8, strategy="channel", group_size=None)),
        ("pack-quantized", (6, 100), ct_weights(num_bits=3, strategy="channel", group_size=None)),
        ("pack-quantized", (9, 96), ct_weights(num_bits=5)),
        ("pack-quantized", (8, 64), ct_weights(strategy="tensor", group_size=None)),
        # W8A8
        ("int-quantized", (24, 72), ct_weights(num_bits=8, strategy="channel", group_size=None)),
        ("int-quantized", (8, 40), ct_weights(num_bits=8, strategy="tensor", group_size=None)),
        ("int-quantized", (16, 128), ct_weights(group_size=64)),  # W4A8
        ("int-quantized", (16, 96), ct_weights(strategy="channel", group_size=None)),
    ],
)
def test_compressed_tensors_as_the_package_writes_them(
    tmp_path: Path,
    kind: str,
    shape: tuple[int, int],
    weights: dict[str, Any],
    symmetric: bool,
    dtype: torch.dtype,
) -> None:
    weights = weights | {"symmetric": symmetric}
    tensors, theirs = ct_write(kind, randn(*shape), weights, dtype)
    group = scheme(weights).model_dump(mode="json")  # as the package writes its config
    checkpoint = load_checkpoint(save(tmp_path, tensors, ct_config(group, format=kind)))
    weight = checkpoint["m"]
    assert weight.shape == shape
    assert weight.bits == (4 if weights["num_bits"] <= 4 else 8)
    assert weight.symmetric == symmetric
    if dtype == torch.float32:
        check(checkpoint, "m", theirs)
    else:
        # The package rounds to its dtype at the end; in 16 bits it subtracts exactly too.
        check(checkpoint, "m", dequantize_weight(weight, torch.float32))
        assert torch.equal(dequantize_weight(weight, dtype), theirs)
    assert list(checkpoint.others) == []


MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}


def test_compressed_tensors_mxfp4_golden_bytes(tmp_path: Path) -> None:
    """Each E2M1 code, the first of a byte in the low nibble, times the scales 2^(126 - 127)
    and 2^(0 - 127).
    """
    pairs = torch.tensor([[2 * i | (2 * i + 1) << 4 for i in range(8)] * 4], dtype=torch.uint8)
    tensors = {
        "m.weight_packed": pairs,
        "m.weight_scale": torch.tensor([[126, 0]], dtype=torch.uint8),
    }
    checkpoint = load_checkpoint(
        save(tmp_path, tensors, ct_config({"weights": MXFP4}, format="mxfp4-pack-quantized"))
    )
    weight = checkpoint["m"]
    assert (weight.shape, weight.group_size, weight.scales.tolist()) == (
        (1, 64),
        32,
        [[0.5, 2.0**-127]],
    )
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    found = dequantize_weight(weight, torch.float32)
    assert torch.equal(found[0, :32], values.repeat(2) / 2)
    assert torch.equal(found[0, 32:], values.repeat(2) * 2.0**-127)
    packed = reorder(weight)
    assert torch.equal(cutlass_ops.dequantize(packed, torch.float32), found)


@pytest.mark.parametrize("shape", [(24, 128), (3, 96)])
def test_compressed_tensors_mxfp4_as_the_package_writes_it(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    made = scheme(MXFP4)
    from compressed_tensors.compressors import BaseCompressor

    values = randn(*shape)
    mine = cutlass_ops.quantize(values, group_size=32, book="mxfp4")
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    compressed = compressor.compress({"weight": values, "weight_scale": mine.scales.float()}, made)
    theirs = compressor.decompress(dict(compressed), made)["weight"]
    tensors = {f"m.{name}": value for name, value in compressed.items()}
    config = ct_config(made.model_dump(mode="json"), format="mxfp4-pack-quantized")
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    check(checkpoint, "m", theirs.float())
    assert torch.equal(checkpoint["m"].scales, mine.scales)
    # Their rounding to E2M1 is this package's.
    assert torch.equal(dequantize_weight(mine, torch.float32), theirs.float())


NVFP4 = MXFP4 | {"strategy": "tensor_group", "group_size": 16}


def test_compressed_tensors_nvfp4_golden_bytes(tmp_path: Path) -> None:
    """Each E2M1 code times e4m3's 1.5, its largest, its least and 0, over 4."""
    scales = torch.tensor([[1.5, 448.0, 2.0**-9, 0.0]]).to(torch.float8_e4m3fn)
    tensors = {
        "m.weight_packed": torch.tensor(
            [[2 * i | (2 * i + 1) << 4 for i in range(8)] * 4], dtype=torch.uint8
        ),
        "m.weight_scale": scales,
        "m.weight_global_scale": torch.tensor([4.0]),
    }
    config = ct_config({"weights": NVFP4}, format="nvfp4-pack-quantized")
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    weight = checkpoint["m"]
    assert (weight.shape, weight.group_size) == ((1, 64), 16)
    assert weight.scales.tolist() == [[0.375, 112.0, 2.0**-11, 0.0]]
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    found = dequantize_weight(weight, torch.float32)
    assert torch.equal(found.view(4, 16), weight.scales.view(4, 1) * values)
    assert torch.equal(cutlass_ops.dequantize(reorder(weight), torch.float32), found)
    assert list(checkpoint.others) == []


@pytest.mark.parametrize("shape", [(24, 128), (3, 96)])
def test_compressed_tensors_nvfp4_as_the_package_writes_it(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    made = scheme(NVFP4)
    from compressed_tensors.compressors import BaseCompressor

    values = randn(*shape)
    whole = 448 * 6 / values.abs().amax().reshape(1)
    scales = values.view(shape[0], -1, 16).abs().amax(-1) / 6 * whole
    scales = scales.to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    state = {"weight": values, "weight_scale": scales, "weight_global_scale": whole}
    compressed = compressor.compress(state, made)
    theirs = compressor.decompress(dict(compressed), made)["weight"]
    tensors = {f"m.{name}": value for name, value in compressed.items()}
    config = ct_config(made.model_dump(mode="json"), format="nvfp4-pack-quantized")
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    assert torch.equal(dequantize_weight(checkpoint["m"], theirs.dtype), theirs)
    reorder_checkpoint(checkpoint, tmp_path / "p.safetensors")
    assert verify_packed(tmp_path / "p.safetensors", checkpoint).problems == []


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_compressed_tensors_refuses_an_nvfp4_scale_that_is_nan(
    tmp_path: Path, value: float
) -> None:
    tensors = {
        "m.weight_packed": torch.zeros(4, 32, dtype=torch.uint8),
        "m.weight_scale": torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "m.weight_global_scale": torch.tensor([value]),
    }
    config = ct_config({"weights": NVFP4}, format="nvfp4-pack-quantized")
    with pytest.raises(CheckpointError, match="weight_global_scale': is"):
        load_checkpoint(save(tmp_path, tensors, config))["m"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"m.weight_scale": torch.full((4, 2), 255, dtype=torch.uint8)},
            r"\[0, 0\] is 255, which is NaN",
        ),
        (
            {"m.weight_scale": torch.ones(4, 1, dtype=torch.uint8)},
            r"U8 \[4, 1\]; uint8 \[4, 2\] is expected",
        ),
        ({"m.weight_scale": torch.ones(4, 2)}, "F32"),
        (
            {"m.weight_global_scale": torch.ones(1)},
            r"weight_scale': is U8 \[4, 2\]; float8_e4m3fn \[4, 4\] is expected",
        ),
        (
            {"m.weight_zero_point": torch.ones(4, 2, dtype=torch.uint8)},
            "zero points, which is not supported",
        ),
    ],
)
def test_compressed_tensors_refuses_what_is_not_mxfp4(
    tmp_path: Path, change: dict[str, Tensor], message: str
) -> None:
    tensors = {
        "m.weight_packed": randint(256, 4, 32).to(torch.uint8),
        "m.weight_scale": torch.ones(4, 2, dtype=torch.uint8),
    }
    config = ct_config({"weights": MXFP4}, format="mxfp4-pack-quantized")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(save(tmp_path, tensors | change, config))["m"]


def test_compressed_tensors_of_mixed_precision(tmp_path: Path) -> None:
    """Groups of targets by name, expression and class; the head is ignored and stays a float."""
    import_or_skip("compressed_tensors")
    kinds = {
        "model.layers.0.q": (
            "int-quantized",
            ct_weights(num_bits=8, strategy="channel", group_size=None),
        ),
        "model.layers.0.k": ("int-quantized", ct_weights(strategy="channel", group_size=None)),
        "model.layers.1.k": ("int-quantized", ct_weights(strategy="channel", group_size=None)),
        "model.layers.0.up": ("pack-quantized", ct_weights(num_bits=8, group_size=64)),
        "model.layers.0.down": ("pack-quantized", ct_weights(symmetric=False)),
    }
    tensors: dict[str, Tensor] = {"lm_head.weight": randn(3, 8), "model.norm.weight": torch.ones(2)}
    theirs = {}
    for seed, (module, (kind, weights)) in enumerate(kinds.items()):
        written, theirs[module] = ct_write(kind, randn(16, 64, seed=seed), weights, torch.float32)
        tensors |= {name.replace("m.", f"{module}.", 1): value for name, value in written.items()}
    tensors["model.layers.0.q.input_scale"] = torch.ones(1)
    tensors["model.layers.0.q.input_zero_point"] = torch.zeros(1, dtype=torch.int8)
    config = ct_config(
        {"weights": kinds["model.layers.0.q"][1], "format": "int-quantized"},
        {
            "targets": [r"re:.*\.k$"],
            "weights": kinds["model.layers.0.k"][1],
            "format": "int-quantized",
        },
        {
            "targets": ["model.layers.0.up"],
            "weights": kinds["model.layers.0.up"][1],
            "format": "pack-quantized",
        },
        {
            "targets": ["re:.*down$"],
            "weights": kinds["model.layers.0.down"][1],
            "format": "pack-quantized",
        },
        format="mixed-precision",
    )
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    assert checkpoint.dialect == "compressed-tensors"
    assert sorted(checkpoint) == sorted(kinds)
    for module, (_, weights) in kinds.items():
        assert check(checkpoint, module, theirs[module]).bits == weights["num_bits"]
    assert sorted(checkpoint.others) == ["lm_head.weight", "model.norm.weight"]


def test_compressed_tensors_as_a_whole_model_is_saved(tmp_path: Path) -> None:
    """A model that the package quantises and compresses itself, with its own config."""
    ct = import_or_skip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(64, 32))
    model.add_module("down", torch.nn.Linear(32, 64, bias=False))
    model.add_module("lm_head", torch.nn.Linear(64, 8, bias=False))
    made = scheme(ct_weights(symmetric=False))
    config = QuantizationConfig(config_groups={"group_0": made}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in (model.up, model.down):
        module.weight_scale.data = randn(*module.weight_scale.shape).abs() / 10
        module.weight_zero_point.data = (
            randint(16, *module.weight_zero_point.shape).sub(8).to(torch.int8)
        )
    compressor = ct.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    settings = json.loads(json.dumps(compressor.quantization_config.model_dump(mode="json")))
    checkpoint = load_checkpoint(save(tmp_path, dict(model.state_dict()), settings))
    assert list(checkpoint.others) == ["lm_head.weight"]
    biases = {name: checkpoint[name].bias for name in checkpoint}
    assert biases["down"] is None
    assert torch.equal(biases["up"], model.up.bias)
    compressor.decompress_model(model)
    for name in ("up", "down"):
        check(checkpoint, name, model.get_submodule(name).weight)


@pytest.mark.parametrize("sorted_groups", [True, False])
def test_compressed_tensors_g_idx(tmp_path: Path, sorted_groups: bool) -> None:
    n, k, size = 16, 128, 32
    codes, zeros, scales = randint(16, n, k), randint(16, n, 4, seed=3), randn(n, 4)
    index = torch.arange(k) // size
    if not sorted_groups:
        index = index[torch.randperm(k, generator=torch.Generator().manual_seed(5))]
    tensors = {
        "m.weight_packed": words(codes, 4),
        "m.weight_shape": torch.tensor([n, k]),
        "m.weight_scale": scales,
        "m.weight_zero_point": words(zeros.t(), 4).t(),
        "m.weight_g_idx": index.int(),
    }
    config = ct_config({"weights": ct_weights(actorder="group", symmetric=False)})
    checkpoint = load_checkpoint(save(tmp_path, tensors, config))
    weight = check(checkpoint, "m", expected(codes, scales, zeros, index))
    assert (weight.perm is None) == sorted_groups
    # What was never set is no order.
    tensors["m.weight_g_idx"] = torch.full((k,), -1, dtype=torch.int32)
    check(
        load_checkpoint(save(tmp_path, tensors, config)), "m", expected(codes, scales, zeros, size)
    )
    tensors["m.weight_g_idx"] = torch.full((k,), 4, dtype=torch.int32)
    with pytest.raises(CheckpointError, match="holds groups 4 to 4; there are 4"):
        load_checkpoint(save(tmp_path, tensors, config))


def test_compressed_tensors_in_blocks(tmp_path: Path) -> None:
    """A scale for each 32 x 64 weights, the last of them short both ways."""
    n, k = 40, 160
    codes, scales = randint(256, n, k), randn(2, 3)
    tensors = {"m.weight": (codes - 128).to(torch.int8), "m.weight_scale": scales}
    weights = ct_weights(num_bits=8, strategy="block", block_structure=[32, 64], group_size=None)
    checkpoint = load_checkpoint(
        save(tmp_path, tensors, ct_config({"weights": weights}, format="int-quantized"))
    )
    check(checkpoint, "m", expected(codes, scales.repeat_interleave(32, 0)[:n], 128, 64))
    # Blocks beyond the weight end with it.
    weights["block_structure"] = [1 << 40, 1 << 70]
    tensors["m.weight_scale"] = scales[:1, :1]
    checkpoint = load_checkpoint(
        save(tmp_path, tensors, ct_config({"weights": weights}, format="int-quantized"))
    )
    check(checkpoint, "m", expected(codes, scales[:1, :1].expand(n, 1), 128, k))


def ct_module(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {
        "m.weight_packed": words(randint(16, 8, 64), 4),
        "m.weight_shape": torch.tensor([8, 64]),
        "m.weight_scale": randn(8, 2),
    }
    return {name: value for name, value in {**tensors, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("tensors", "config", "match"),
    [
        (ct_module(**{"m.weight_shape": None}), {}, "'m.weight_shape': is missing"),
        (ct_module(**{"m.weight_packed": None}), {}, "'m.weight_packed': is missing"),
        (ct_module(**{"m.weight_scale": None}), {}, "'m.weight_scale': is missing"),
        (
            ct_module(**{"m.weight_shape": torch.tensor([8, 1 << 40])}),
            {},
            "fits no bits of its config",
        ),
        (
            ct_module(**{"m.weight_shape": torch.tensor([9, 64])}),
            {},
            r"is \[9, 64\]; the codes are \[8, 8\]",
        ),
        (ct_module(**{"m.weight_shape": torch.tensor([8, -64])}), {}, r"is \[8, -64\]"),
        (ct_module(**{"m.weight_shape": torch.tensor([8, 72])}), {}, "fits no bits of its config"),
        (ct_module(**{"m.weight_scale": randn(8, 3)}), {}, "no known size of groups fits"),
        (ct_module(**{"m.weight_scale": randn(7, 2)}), {}, r"\[N, G\] or \[1\] is expected"),
        (
            ct_module(**{"m.weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)}),
            {},
            r"int32 \[1, 2\] is expected",
        ),
        (
            ct_module(**{"m.weight_zero_point": torch.zeros(8, 2, dtype=torch.uint8)}),
            {},
            r"int8 \[8, 2\] is expected",
        ),
        (ct_module(), {"config_groups": []}, "config_groups is"),
        (ct_module(), {"config_groups": {"g": []}}, "'g' has no list of targets"),
        (ct_module(), {"config_groups": {"g": {"targets": [1]}}}, "'g' has no list of targets"),
        (
            ct_module(),
            {"config_groups": {"g": {"targets": [], "weights": {"num_bits": "4"}}}},
            "num_bits is '4'",
        ),
        (
            ct_module(),
            {"config_groups": {"g": {"targets": [], "weights": {"num_bits": 8}}}},
            r"fits no bits of its config \(8\)",
        ),
        (
            ct_module(),
            {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparse weights are not supported",
        ),
        (
            ct_module(),
            {"transform_config": {"config_groups": {"R1": {}}}},
            "rotated activations are not supported",
        ),
        (
            {"m.weight": torch.full((4, 32), 8, dtype=torch.int8), "m.weight_scale": randn(4, 1)},
            {},
            "holds 8 to 8; 4 bits",
        ),
    ],
)
def test_compressed_tensors_that_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], match: str
) -> None:
    path = save(tmp_path, tensors, ct_config({"weights": ct_weights()}) | config)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path)["m"]


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (
            {"m.weight": torch.zeros(4, 4).to(torch.float8_e5m2), "m.weight_scale": randn(4, 1)},
            "holds F8_E5M2 beside a scale",
        ),
        (ct_module(**{"m.weight_packed": torch.zeros(2, 8, 8, dtype=torch.int32)}), "3 dimensions"),
        (
            {"m.weight": torch.zeros(2, 2, 2, dtype=torch.int8), "m.weight_scale": randn(1)},
            r"is \[2, 2, 2\]",
        ),
    ],
)
def test_compressed_tensors_without_a_kernel(
    tmp_path: Path, tensors: dict[str, Tensor], match: str
) -> None:
    checkpoint = load_checkpoint(save(tmp_path, tensors, ct_config({"weights": ct_weights()})))
    assert list(checkpoint.entries) == ["m"]
    with pytest.raises(CheckpointError, match=match):
        checkpoint["m"]
    with pytest.raises(CheckpointError, match=match):
        checkpoint.entries["m"].values()


@pytest.mark.parametrize(
    "target",
    [
        "re:(a+)+$",
        "re:.*.*.*.*x",
        "re:" + "(?:a|aa)" * 38,
        "re:" + "a?" * 38 + "a" * 180 + "b",
        "re:(?x)(?:a|aa) *b",
        "re:" + "a" * 2000,
        "re:(",
        "re:[b-a]",
        "re:a{99999999999}",
    ],
)
def test_expressions_that_are_refused(tmp_path: Path, target: str) -> None:
    """A file's own expressions run on its own names; none of them may run for ever."""
    module = "a" * 200
    tensors = {
        f"{module}.weight": torch.zeros(4, 32, dtype=torch.int8),
        f"{module}.weight_scale": randn(4, 1),
    }
    config = ct_config(
        {"targets": [target], "weights": ct_weights()}, {"weights": ct_weights(num_bits=8)}
    )
    with pytest.raises(CheckpointError, match=r"the target"):
        load_checkpoint(save(tmp_path, tensors, config))


@pytest.mark.parametrize(
    "target",
    [
        r"re:model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj$",
        r"re:.*layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12|13|14|15)\..*\.(q|k|v|o|gate|up|down)_proj.*",
        r"re:(?!.*lm_head).*\.layers\..*self_attn.*",
    ],
)
def test_expressions_of_real_models(tmp_path: Path, target: str) -> None:
    module = "model.layers.11.self_attn.q_proj"
    tensors = {
        f"{module}.weight": torch.full((4, 32), 7, dtype=torch.int8),
        f"{module}.weight_scale": randn(4, 1),
    }
    config = ct_config(
        {"targets": [target], "weights": ct_weights()},
        {"targets": ["Linear"], "weights": ct_weights(num_bits=8)},
    )
    assert load_checkpoint(save(tmp_path, tensors, config))[module].bits == 4
