"""The state of a packed model: a plain model refuses it, a packed model loads only its own."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

import cutlass_ops as co


class Net(nn.Module):
    def __init__(self, k: int = 64) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(k, 64),
            nn.Linear(k, 32, bias=False),
            nn.Linear(k, 32),
        )
        self.conv = nn.Conv1d(2, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        result: Tensor = self.conv(y.reshape(len(x), 2, 64))
        return result


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def quantized(model: Any, bits: int = 8, **options: Any) -> Any:
    return co.quantize_model(model, bits, **{"group_size": 32, **options})


def fused(model: Any) -> Any:
    co.fuse_linears(quantized(model))
    return model


def convolved(model: Any) -> Any:
    co.replace_convs(model, {"conv": co.reorder(co.quantize(model.conv.weight.detach(), 8, 32))})
    return model


PACKED = {"linear": quantized, "fused": fused, "convolution": convolved}
FOUND = {"linear": "q_proj.weight", "fused": "q_proj.weight", "convolution": "conv.weight"}


def through_torch(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    result: dict[str, Tensor] = torch.load(file, weights_only=True)
    return result


def through_safetensors(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    save_file(state, path / "x.safetensors")
    return load_file(path / "x.safetensors")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("through", [through_torch, through_safetensors])
@pytest.mark.parametrize("kind", PACKED)
def test_a_plain_model_refuses_a_packed_state(
    kind: str, through: Any, strict: bool, tmp_path: Path
) -> None:
    model = PACKED[kind](net())
    state = through(model.state_dict(), tmp_path)
    with pytest.raises(RuntimeError, match=f"size mismatch for {FOUND[kind]}"):
        net().load_state_dict(state, strict=strict)
    again = PACKED[kind](net(1))
    x = torch.randn(3, 64)
    assert not torch.equal(again(x), model(x))
    assert again.load_state_dict(state, strict=strict) == ([], [])
    assert torch.equal(again(x), model(x))


def test_whole_models_through_safetensors(tmp_path: Path) -> None:
    model, x = quantized(net()), torch.randn(3, 64)
    save_model(model, str(tmp_path / "x.safetensors"))
    with pytest.raises(RuntimeError, match=r"size mismatch for q_proj\.weight"):
        load_model(net(), str(tmp_path / "x.safetensors"), strict=False)
    again = quantized(net(1))
    load_model(again, str(tmp_path / "x.safetensors"))
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            {"bits": 4},
            r"q_proj\.weight is of a packed weight that is .*'bits': 4.*; the layer's is "
            r".*'bits': 8",
        ),
        ({"group_size": 64}, "'group_size': 64"),
        ({"symmetric": True}, r"'tensors': \['bias', 'codes', 'scales'\]"),
    ],
)
def test_a_packed_model_refuses_another_format(other: dict[str, Any], match: str) -> None:
    state = quantized(net(), **other).state_dict()
    with pytest.raises(RuntimeError, match=match):
        quantized(net()).load_state_dict(state, strict=False)


def test_a_packed_model_refuses_plain_weights() -> None:
    model = quantized(net())
    with pytest.raises(
        RuntimeError, match=r"q_proj\.weight is a plain weight, and the layer is packed"
    ):
        model.load_state_dict(net(1).state_dict(), strict=False)
    unmarked = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[2] != "weight"
    }
    del unmarked["conv.bias"]
    # as older versions saved
    assert model.load_state_dict(unmarked, strict=False) == (["conv.weight", "conv.bias"], [])


def test_fused_parts_know_their_rows() -> None:
    state = fused(net()).state_dict()
    state["k_proj.weight"], state["v_proj.weight"] = state["v_proj.weight"], state["k_proj.weight"]
    with pytest.raises(
        RuntimeError,
        match=r"k_proj\.weight is of a packed weight that is \{'fused_rows': \[96, 128\]\}",
    ):
        fused(net()).load_state_dict(state)


def test_experts_are_marked_where_transformers_has_parameters(tmp_path: Path) -> None:
    transformers = import_or_skip("transformers")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2)
    model = transformers.MixtralForCausalLM(config)
    plain, packed = (
        copy.deepcopy(model),
        quantized(copy.deepcopy(model), skip=("self_attn", "lm_head", "gate")),
    )
    state = through_safetensors(packed.state_dict(), tmp_path)
    with pytest.raises(
        RuntimeError, match=r"size mismatch for model\.layers\.0\.mlp\.experts\.gate_up_proj"
    ):
        plain.load_state_dict(state, strict=False)
    packed.load_state_dict(state)


def test_layers_without_values_are_not_marked() -> None:
    model = quantized(net()).to("meta")
    assert {name for name in model.state_dict() if name.endswith(".weight")} == {"conv.weight"}


def test_the_hub_mixin_refuses_to_save_a_packed_module(tmp_path: Path) -> None:
    hub = import_or_skip("huggingface_hub")

    class Hub(Net, hub.PyTorchModelHubMixin):
        pass

    model = quantized(Hub())
    with pytest.raises(
        ValueError,
        match=r"the layers q_proj, k_proj, v_proj are packed.*torch\.save\(model\.state_dict\(\)",
    ):
        model.save_pretrained(tmp_path)
    # what the message says
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = quantized(Hub())
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    x = torch.randn(3, 64)
    assert torch.equal(again(x), model(x))
    plain = Hub()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain.save_pretrained(tmp_path)
        assert torch.equal(Hub.from_pretrained(tmp_path)(x), plain(x))
