"""Whole model directories: what is written, what is read back, interrupted and split."""

from __future__ import annotations

import json

import pytest
import torch

from cutlass_ops.model_directory import WeightFormat, quantization_config, weight_format

FOUR = WeightFormat(4, 128, (("scales", torch.float16), ("zeros", torch.int8)))
EIGHT = WeightFormat(8, -1, (("bias", torch.bfloat16), ("scales", torch.float32)))


def test_the_config_gives_every_module_its_format() -> None:
    config = quantization_config({"a": FOUR, "b": FOUR, "c": EIGHT}, ["lm_head"])
    config = json.loads(json.dumps(config))
    assert config["quant_method"] == "cutlass_ops"
    assert (config["bits"], config["group_size"], config["tensors"]) == (4, 128, {"scales": "float16", "zeros": "int8"})
    assert config["modules"].keys() == {"c"}
    assert [weight_format(config, name) for name in ("a", "b", "c", "lm_head")] == [FOUR, FOUR, EIGHT, None]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layout": "other"}, "layout 'other', version 1; known is"),
        ({"layout_version": 2}, "version 2"),
        ({"bits": 3}, "bits is 3"),
        ({"group_size": 48}, "group_size is 48"),
        ({"tensors": {"scales": "Tensor"}}, "'scales' has dtype 'Tensor'"),
        ({"tensors": {"scales": 5}}, "'scales' has dtype 5"),
        ({"tensors": None}, "tensors are expected"),
    ],
)
def test_a_config_that_means_nothing(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        weight_format({**quantization_config({"a": FOUR}), **change}, "a")
