"""A config that announces a part which the file lacks, or a part that no reader takes: refused,
never read as something else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hostile_dialects as dialects
import hostile_directories as directories
import pytest
import torch
from hostile_cases import header_length, raw_safetensors
from llm_checkpoints import ct_config, ct_weights, gptq, gptq_config, randint, randn, words

from cutlass_ops import CheckpointError, load_checkpoint

Tensors = dict[str, torch.Tensor]
CODES, SCALES = randint(16, 8, 64), randn(8, 2).half()
PACKED: Tensors = {
    "m.weight_packed": words(CODES, 4),
    "m.weight_shape": torch.tensor([8, 64]),
    "m.weight_scale": SCALES,
}
INT8: Tensors = {
    "m.weight": randint(256, 8, 64).sub(128).to(torch.int8),
    "m.weight_scale": randn(8, 1),
}
GPTQ: Tensors = gptq(CODES, torch.full((8, 2), 8), SCALES, 4, 1)
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
ASYMMETRIC = ct_config({"weights": ct_weights(symmetric=False)})
CHANNEL = ct_weights(num_bits=8, strategy="channel", group_size=None)


def two_groups(symmetric: bool) -> dict[str, Any]:
    first = {"targets": ["re:other.*"], "weights": ct_weights(symmetric=not symmetric)}
    return ct_config(first, {"targets": ["m"], "weights": ct_weights(symmetric=symmetric)})


MISSING: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "ct zero points": (PACKED, ASYMMETRIC, r"'m\.weight_zero_point': is missing; .* not symmetric"),
    "ct zero points of one group of two": (
        PACKED,
        two_groups(False),
        r"'m\.weight_zero_point': is missing",
    ),
    "ct zero points of int8": (
        INT8,
        ct_config({"weights": CHANNEL | {"symmetric": False}}),
        r"'m\.weight_zero_point': is missing",
    ),
    "ct symmetric that is no flag": (
        PACKED,
        ct_config({"weights": ct_weights(symmetric="no")}),
        "symmetric is 'no'",
    ),
    "ct act order": (
        PACKED,
        ct_config({"weights": ct_weights(actorder="group")}),
        r"'m\.weight_g_idx': is missing",
    ),
    "ct scale without its weight": (
        PACKED | {"x.weight_scale": SCALES.clone()},
        ct_config({"weights": ct_weights()}),
        "'x.weight_scale'",
    ),
    "ct unknown part": (
        PACKED | {"m.weight_global_scale": torch.ones(1)},
        ct_config({"weights": ct_weights()}),
        "'m.weight_global_scale': belongs to no",
    ),
    "gptq act order": (
        GPTQ,
        gptq_config(desc_act=True),
        r"'m\.g_idx': is missing; the config says desc_act",
    ),
    "gptq desc_act that is no flag": (GPTQ, gptq_config(desc_act="yes"), "desc_act is 'yes'"),
    "gptq order of another module": (
        GPTQ | {"x.g_idx": torch.zeros(64).int()},
        gptq_config(),
        r"'x\.g_idx': belongs to no",
    ),
    "gptq unknown part": (
        GPTQ | {"m.rotation": torch.ones(64)},
        gptq_config(),
        r"'m\.rotation': is F32 \[64\], no part",
    ),
    "bitsandbytes int8 without SCB": (
        {"m.weight": INT8["m.weight"]},
        BNB8,
        r"'m\.SCB': is missing",
    ),
    "bitsandbytes codes alone": (
        {"m.weight": torch.zeros(16, 1).byte()},
        {"quant_method": "bitsandbytes"},
        r"'m\.SCB': is missing",
    ),
    "bitsandbytes SCB of a float weight": (
        {"m.weight": randn(4, 8), "m.SCB": randn(4)},
        BNB8,
        r"'m\.SCB': belongs to no",
    ),
    "bitsandbytes SCB of another length": (
        {"m.weight": torch.zeros(1, 4, 8, dtype=torch.int8), "m.SCB": randn(4)},
        BNB8,
        r"'m\.SCB': is F32 \[4\]",
    ),
    "bitsandbytes SCB of bytes": (
        {"m.weight": torch.zeros(4, 8).byte(), "m.SCB": randn(4)},
        BNB8,
        r"'m\.weight': is U8",
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_part_that_is_missing_or_not_known(tmp_path: Path, name: str) -> None:
    tensors, config, match = MISSING[name]
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(directories.write(tmp_path, tensors, config))


def test_an_act_order_that_the_config_does_not_announce_may_be_missing(tmp_path: Path) -> None:
    one_group = ct_config({"weights": ct_weights(symmetric=True, actorder="weight")})
    for tensors, config in (
        (PACKED, one_group),
        (PACKED, two_groups(True)),
        (GPTQ, gptq_config(desc_act=False)),
    ):
        assert list(load_checkpoint(directories.write(tmp_path, tensors, config))) == ["m"]
    whole = {**PACKED, "m.weight_scale": SCALES[:, :1].contiguous()}  # one group has no order
    config = ct_config(
        {"weights": ct_weights(strategy="channel", group_size=None, actorder="group")}
    )
    assert list(load_checkpoint(directories.write(tmp_path, whole, config))) == ["m"]


def test_static_activations_are_said_to_be_unused(tmp_path: Path) -> None:
    static = INT8 | {
        "m.input_scale": torch.ones(1),
        "m.input_zero_point": torch.zeros(1).to(torch.int8),
    }
    checkpoint = load_checkpoint(
        directories.write(tmp_path, static, ct_config({"weights": CHANNEL}))
    )
    assert list(checkpoint) == ["m"]
    assert checkpoint.metadata["static activations"] == "input_scale of 1 modules is not used"
    assert checkpoint.activations is None


@pytest.mark.parametrize(
    ("dialect", "change", "match"),
    [
        ("hqq", {"x.zero": torch.ones(4)}, r"'x\.zero': belongs to no"),
        ("hqq", {"m.scale_q": torch.ones(4)}, r"'m\.scale_q': is F32 \[4\], no part"),
        ("hqq", {"m.W_q": None, "m.nbits": None}, r"'m\.zero': belongs to no"),
        (
            "bitsandbytes",
            {"f.weight.nested_absmax": torch.ones(3)},
            r"'f\.weight\.nested_absmax': belongs to absmax of 8 bits",
        ),
        (
            "bitsandbytes",
            {"m.weight.absmax": torch.ones(9)},
            r"'m\.weight\.nested_absmax': belongs to absmax of 8 bits",
        ),
        (
            "bitsandbytes",
            {"m.weight.other": torch.ones(3)},
            r"'m\.weight\.other': is F32 \[3\], no part",
        ),
        ("bitsandbytes", {"x.weight_format": torch.zeros(1)}, r"'x\.weight_format': belongs to no"),
    ],
)
def test_parts_of_other_dialects(
    tmp_path: Path, dialect: str, change: dict[str, Any], match: str
) -> None:
    tensors = {
        name: value
        for name, value in (dialects.MODELS[dialect] | change).items()
        if value is not None
    }
    path = dialects.write(tmp_path, dialect, dialects.saved(dialect, tensors))
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path)


def test_a_quant_state_that_announces_missing_nested_scales(tmp_path: Path) -> None:
    state = dialects.as_json(dialects.STATE | {"nested_blocksize": 4})
    tensors = dialects.MODELS["bitsandbytes"] | {"f.weight.quant_state.bitsandbytes__fp4": state}
    with pytest.raises(CheckpointError, match="nested_blocksize is stated; absmax is F32"):
        load_checkpoint(
            dialects.write(tmp_path, "bitsandbytes", dialects.saved("bitsandbytes", tensors))
        )


def test_names_of_torchaos_tensors(tmp_path: Path) -> None:
    def saved(names: list[str], tensors: dict[str, Any]) -> Path:
        content = dialects.saved("torchao", {k: v for k, v in tensors.items() if v is not None})
        length = header_length(content)
        header = json.loads(content[8 : 8 + length])
        described = json.loads(header["__metadata__"]["x.weight"]) | {"_tensor_data_names": names}
        header["__metadata__"]["x.weight"] = json.dumps(described)
        return dialects.write(tmp_path, "torchao", raw_safetensors(header, content[8 + length :]))

    model = dialects.MODELS["torchao"]
    assert "x" in load_checkpoint(saved(["qdata", "scale", "zero_point"], model))
    for names, change in (
        (["qdata", "scale"], {}),
        (["qdata", "scale", "zero_point"], {"x._weight_zero_point": None}),
    ):
        with pytest.raises(CheckpointError, match=r"'x\.weight': its metadata names the parts"):
            load_checkpoint(saved(names, model | change))
    with_other = dialects.saved("torchao", model | {"x._weight_other": torch.ones(3)})
    assert (
        "'other', which is not known"
        in load_checkpoint(dialects.write(tmp_path, "torchao", with_other)).entries["x"].problem
    )


def test_a_sparse_mnn_weight(tmp_path: Path) -> None:
    graph = json.loads(json.dumps(dialects.GRAPH))
    graph["oplists"][0]["main"]["external"][4] = 8
    with pytest.raises(CheckpointError, match="sparse weights"):
        load_checkpoint(dialects.write_mnn(tmp_path, graph, dialects.BLOB))


# ---- sizes that no machine has


@pytest.mark.parametrize("size", [10**9, 10**18, 1 << 60, -(10**9), 10**400])
@pytest.mark.parametrize("key", ["bits", "group_size"])
def test_a_config_of_absurd_sizes(tmp_path: Path, key: str, size: int) -> None:
    for name, settings in (("gptq", gptq_config()), ("awq gemm", directories.AWQ_CONFIG)):
        config = {**settings, key: size}
        with pytest.raises(CheckpointError):
            load_checkpoint(directories.write(tmp_path, directories.FILES[name], config))
    weights = ct_weights(**{"num_bits" if key == "bits" else key: size})
    with pytest.raises(CheckpointError):
        load_checkpoint(directories.write(tmp_path, PACKED, ct_config({"weights": weights})))["m"]


def test_an_empty_tensor_of_absurd_sizes(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F32", "shape": [1 << 62, 0, 1 << 62], "data_offsets": [0, 0]}}
    (tmp_path / "m.safetensors").write_bytes(raw_safetensors(header, b""))
    assert load_checkpoint(tmp_path / "m.safetensors").entries["x"].values().shape == (
        1 << 62,
        0,
        1 << 62,
    )


def test_json_that_is_nested_deeply(tmp_path: Path) -> None:
    config = gptq_config() | {"dynamic": {"m": json.loads('{"a":' * 200 + "1" + "}" * 200)}}
    with pytest.raises(CheckpointError, match="more than 100 deep"):
        load_checkpoint(directories.write(tmp_path, GPTQ, config))
