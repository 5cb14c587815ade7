"""Convolution layers over packed weights, in the place of torch's."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutlass_ops as co


class Net(nn.Module):
    """Convolutions of one, two and three dimensions, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Conv3d(4, 12, (2, 3, 3), stride=(2, 1, 1), padding=(0, 1, 1))
        self.two = nn.Sequential(
            nn.Conv2d(12, 18, 3, padding="same", dilation=2, groups=3), nn.ReLU()
        )
        self.one = nn.Conv1d(18, 5, 4, padding="valid", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.three(x)[:, :, 0]
        return self.one(self.two(y).flatten(2))


NAMES = ("three", "two.0", "one")


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().eval()


def packed_of(model: nn.Module, **options: Any) -> dict[str, co.PackedWeight]:
    modules = dict(model.named_modules())
    return {
        name: co.reorder(
            co.quantize(modules[name].weight.detach(), **{"bits": 8, "group_size": 32, **options})
        )
        for name in NAMES
    }


@torch.no_grad()
def test_a_model_computes_with_its_dequantised_weights() -> None:
    model = net()
    packed = packed_of(model)
    for name, weight in packed.items():
        model.get_submodule(name).weight.copy_(co.dequantize(weight, torch.float32))
    x = torch.randn(2, 4, 2, 7, 6)
    expected = model(x)
    assert co.replace_convs(model, packed) == list(NAMES)
    y = model(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert isinstance(model.two[0], co.nn.MixedConv2d)
    assert not model.two[0].training
    assert (
        "12, 18, kernel_size=(3, 3), stride=(1, 1), padding=(2, 2), dilation=(2, 2), "
        "groups=3, bias=True" in repr(model)
    )


@torch.no_grad()
def test_options_of_activations() -> None:
    model, x = net(), torch.randn(2, 4, 2, 7, 6)
    packed = packed_of(model)
    co.replace_convs(model, packed, "tensor", False)
    layer: Any = model.three
    y = layer(x)
    expected = co.mixed_conv3d(
        x, layer.packed, None, (2, 1, 1), (0, 1, 1), act_quant="tensor", act_symmetric=False
    )
    assert torch.equal(y, expected)
    assert "act_quant='tensor', act_symmetric=False" in repr(layer)
    co.set_activations(model, "token")
    assert torch.equal(
        layer(x), co.mixed_conv3d(x, layer.packed, None, (2, 1, 1), (0, 1, 1), act_quant="token")
    )
    clamped = co.nn.MixedConv3d(
        packed["three"], (2, 1, 1), (0, 1, 1), activation=("clamp", -0.125, 0.25)
    )
    assert float(clamped(x).max()) == 0.25
    assert "activation=('clamp', -0.125, 0.25)" in repr(clamped)


@torch.no_grad()
def test_buffers_move_load_and_copy_as_any_other() -> None:
    model, x = net(), torch.randn(2, 4, 2, 7, 6)
    co.replace_convs(model, packed_of(model))
    expected = model(x)
    assert {"codes", "scales", "bias", "weight"} == {
        name.rpartition(".")[2] for name in model.state_dict()
    }
    other = net(1)
    co.replace_convs(other, packed_of(other))
    assert not torch.equal(other(x), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)
    for assigned in (copy.deepcopy(model), torch.load(_saved(model), weights_only=False)):
        assert torch.equal(assigned(x), expected)
    # Scales stay as they are in other dtypes.
    half = copy.deepcopy(model).half()
    assert half.three.scales.dtype == torch.float32
    assert half(x.half()).dtype == torch.float16
    other = net(1)
    co.replace_convs(other, packed_of(other))
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other(x), expected)
    other.three.scales = model.three.scales * 2
    assert not torch.equal(other(x), expected)
    other.three.scales = torch.ones(3)
    with pytest.raises(ValueError, match="scales has shape"):
        other(x)


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


@torch.no_grad()
def test_packed_files_and_back(tmp_path: Any) -> None:
    model, x = net(), torch.randn(2, 4, 2, 7, 6)
    co.save_packed(tmp_path / "net.safetensors", packed_of(model, bits=4, symmetric=False))
    loaded = co.load_packed(tmp_path / "net.safetensors")
    other = copy.deepcopy(model)
    co.replace_convs(model, packed_of(model, bits=4, symmetric=False))
    co.replace_convs(other, loaded)
    assert torch.equal(other(x), model(x))


@torch.no_grad()
def test_dequantize() -> None:
    model = net()
    packed = packed_of(model)
    co.replace_convs(model, packed)
    layer: Any = model.one
    assert torch.equal(layer.dequantize(torch.float32), co.dequantize(packed["one"], torch.float32))
    assert layer.dequantize().shape == (5, 18, 4)


@torch.no_grad()
def test_compile() -> None:
    model = net()
    co.replace_convs(model, packed_of(model), "block")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (7, 9):
        x = torch.randn(2, 4, 2, size, 6)
        assert torch.equal(compiled(x), model(x))


def test_what_does_not_fit_leaves_the_model_as_it_was() -> None:
    model = net()
    packed = packed_of(model)
    linear = co.reorder(co.quantize(torch.randn(18, 12)))
    odd = nn.Module()
    odd.even = nn.Conv2d(4, 4, 2, padding="same")
    odd.reflecting = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
    odd.transposed = nn.ConvTranspose2d(4, 4, 3)
    small = {size: co.reorder(co.quantize(torch.randn(4, 4, size, size))) for size in (2, 3)}
    refused: list[tuple[nn.Module, dict[str, Any], type[Exception], str]] = [
        (model, {**packed, "four": packed["one"]}, ValueError, "'four': the model has no module"),
        (model, {**packed, "two.1": packed["one"]}, TypeError, "'two.1': the module is a ReLU"),
        (
            model,
            {**packed, "one": packed["three"]},
            ValueError,
            r"'one': the packed weight is \[12, 4, 2, 3, 3\]",
        ),
        (
            model,
            {**packed, "two.0": linear},
            ValueError,
            r"'two.0': the packed weight is \[18, 12\]",
        ),
        (
            model,
            {**packed, "one": packed["one"].unpack()},
            TypeError,
            "'one': the weight is a QuantizedWeight",
        ),
        (odd, {"even": small[2]}, ValueError, "'even': padding is 'same' with kernel_size"),
        (odd, {"reflecting": small[3]}, ValueError, "'reflecting': padding_mode is 'reflect'"),
        (odd, {"transposed": small[3]}, TypeError, "'transposed': the module is a ConvTranspose2d"),
    ]
    for owner, weights, error, message in refused:
        with pytest.raises(error, match=message):
            co.replace_convs(owner, weights)
    with pytest.raises(ValueError, match="act_quant is 'row'"):
        co.replace_convs(model, packed, "row")
    assert isinstance(model.three, nn.Conv3d)


def test_layers_refuse_weights_and_options_that_do_not_fit() -> None:
    packed = co.reorder(co.quantize(torch.randn(6, 32, 3, 3)))
    with pytest.raises(TypeError, match="packed is a QuantizedWeight"):
        co.nn.MixedConv2d(packed.unpack())
    with pytest.raises(ValueError, match=r"kernel_size is \(3, 3\); MixedConv1d takes one of 1"):
        co.nn.MixedConv1d(packed)
    with pytest.raises(ValueError, match="stride is 0"):
        co.nn.MixedConv2d(packed, stride=0)
    with pytest.raises(ValueError, match="groups is 5"):
        co.nn.MixedConv2d(packed, groups=5)
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        co.nn.MixedConv2d(packed, activation="tanh")
