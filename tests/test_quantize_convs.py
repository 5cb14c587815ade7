"""quantize_model(convs=True): which convolutions become packed, which stay or are refused, with the
reason, and what is saved.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from warned import said

import cutlass_ops as co
from cutlass_ops.files.packed_file import packed_info


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def quantized(model: Any, bits: int = 4, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return co.quantize_model(model, bits, **{"group_size": 32, "convs": True, **options})


def packed(model: nn.Module) -> dict[str, type]:
    kinds = (co.MixedLinear, co.nn.MixedConv)
    return {
        name: type(module) for name, module in model.named_modules() if isinstance(module, kinds)
    }


# ---- what the layers compute


@pytest.mark.parametrize(
    ("conv", "space"),
    [
        (lambda: nn.Conv1d(64, 64, 3, padding="same", dilation=2), (9,)),
        (
            lambda: nn.Conv2d(128, 96, (3, 2), stride=2, padding=(1, 0), groups=2, bias=False),
            (6, 5),
        ),
        (lambda: nn.Conv3d(64, 70, 2, padding="valid"), (3, 4, 3)),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4},
        {"bits": 8, "act_quant": "block", "symmetric": True},
        {"bits": 4, "group_size": -1},
    ],
)
def test_every_convolution_is_the_packed_one(
    conv: Any, space: tuple[int, ...], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = conv()
    model = quantized(nn.Sequential(copy.deepcopy(plain).eval(), nn.ReLU()), **options)
    layer = model[0]
    assert type(layer).__name__ == f"Mixed{type(plain).__name__}"
    assert not layer.training
    form = {"bits": 4, "group_size": 32, "symmetric": False} | {
        k: v for k, v in options.items() if k != "act_quant"
    }
    expected = co.reorder(co.quantize(plain.weight.detach(), **form)).tensors()
    found = layer.packed.tensors()
    assert (found.pop("bias", None) is None) == (plain.bias is None)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    x = randn(2, plain.in_channels, *space)
    with torch.no_grad():
        plain.weight.copy_(layer.dequantize(torch.float32))
        exact = plain(x).relu()
    assert (model(x) - exact).norm() <= (2e-2 if "act_quant" in options else 1e-6) * exact.norm()


# ---- which layers


class Same(nn.Conv2d):
    """As timm's Conv2dSame."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.inner.weight)


def tied() -> nn.Module:
    pair = nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1))
    pair[1].weight = pair[0].weight
    return pair


def hooked() -> nn.Module:
    conv = nn.Conv2d(64, 64, 3)
    conv.register_forward_hook(lambda layer, args, y: y + 1)
    return conv


def normed() -> nn.Module:
    return parametrizations.weight_norm(nn.Conv2d(64, 64, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Same(64, 64, 3), "Same is not torch.nn.Conv1d, Conv2d or Conv3d itself: 1"),
        (normed, "ParametrizedConv2d is not torch.nn.Conv1d, Conv2d or Conv3d itself: 1"),
        (
            lambda: nn.ConvTranspose2d(64, 64, 3),
            "ConvTranspose2d is not torch.nn.Conv1d, Conv2d or Conv3d itself: 1",
        ),
        (lambda: nn.Conv2d(3, 64, 3), "the packed weight would not be smaller: 1"),  # of an image
        (lambda: nn.Conv2d(256, 256, 3, groups=256), "the packed weight would not be smaller: 1"),
        (lambda: nn.Conv2d(128, 8, 3), "the packed weight would not be smaller: 1"),
        (
            lambda: nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect"),
            "padding_mode is 'reflect'; 'zeros' is supported: 1",
        ),
        (lambda: nn.Conv2d(64, 64, 2, padding="same"), "which pads one side more"),
        (lambda: nn.Conv2d(64, 64, 3).double(), "the weight is float64: 1"),
        (tied, "the weight is also another module's: 1.0, 1.1"),
        (Reads, "Reads reads the weight itself: 1.inner"),
        (hooked, "hooks are registered: 1"),
    ],
)
def test_convolutions_that_stay_in_floating_point_are_warned_of(
    make: Callable[[], nn.Module], message: str
) -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3), make())
    with said(message):
        co.quantize_model(model, 4, 32, convs=True)
    assert packed(model) == {"0": co.nn.MixedConv2d}
    with said():  # no warning for layers that the user named
        co.quantize_model(
            nn.Sequential(nn.Conv2d(64, 64, 3), make()), 4, 32, skip=("1",), convs=True
        )


@pytest.mark.parametrize(
    ("bits", "channels", "dtype", "is_packed"),
    [
        (4, 16, torch.float32, False),
        (4, 17, torch.float32, True),
        (8, 64, torch.float16, False),
        (8, 65, torch.float16, True),
    ],
)
def test_a_convolution_is_packed_if_that_is_smaller(
    bits: int, channels: int, dtype: torch.dtype, is_packed: bool
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Conv2d(channels, 64, 3)).to(dtype)
    before = model[1].weight.nbytes
    assert ("1" in packed(quantized(model, bits))) == is_packed
    if is_packed:
        assert model[1].codes.nbytes < before


class Autoencoder(nn.Module):
    """The names of diffusers for the first and last convolution, here of channels
    enough to be packed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.body, self.conv_out = (
            nn.Conv2d(64, 64, 3),
            nn.Conv2d(64, 64, 3),
            nn.Conv2d(64, 64, 3),
        )
        self.proj = nn.Linear(64, 64)


def test_first_and_last_layers_stay_unless_skip_is_given() -> None:
    assert packed(quantized(Autoencoder())) == {"body": co.nn.MixedConv2d, "proj": co.MixedLinear}
    assert len(packed(quantized(Autoencoder(), skip=()))) == 4
    assert packed(quantized(Autoencoder(), convs=False)) == {"proj": co.MixedLinear}


def test_packed_convolutions_are_passed_over() -> None:
    model = quantized(Autoencoder())
    layer = model.body
    assert len(packed(quantized(model, 8, skip=()))) == 4
    assert model.body is layer
    quantized(model, 8, skip=())  # there is none left


def test_wrong_arguments_are_refused_before_anything_changes() -> None:
    model = Autoencoder()
    with pytest.raises(TypeError, match="convs is 1; True or False is expected"):
        co.quantize_model(model, convs=1)
    with pytest.raises(ValueError, match="the model is itself a Conv2d"):
        co.quantize_model(nn.Conv2d(64, 64, 3), convs=True)
    with pytest.raises(
        ValueError,
        match=r"no linear layer or convolution to quantise \(the packed weight would not be "
        r"smaller: 0",
    ):
        co.quantize_model(nn.Sequential(nn.Conv2d(3, 8, 3)), convs=True)
    with torch.no_grad():
        model.body.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="'body': the weight has NaN or infinite values"):
        co.quantize_model(model, convs=True)
    assert not packed(model)


# ---- models of transformers

IMAGE = {"pixel_values": randn(2, 3, 32, 32)}


def convnext(transformers: Any) -> tuple[Any, dict[str, Tensor]]:
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[32, 64], depths=[1, 1], layer_scale_init_value=0.5
    )
    return transformers.ConvNextForImageClassification(config), IMAGE


def resnet(transformers: Any) -> tuple[Any, dict[str, Tensor]]:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config), IMAGE


def mobilenet(transformers: Any) -> tuple[Any, dict[str, Tensor]]:
    return transformers.MobileNetV1ForImageClassification(
        transformers.MobileNetV1Config(image_size=32, depth_multiplier=0.5)
    ), IMAGE


def segformer(transformers: Any) -> tuple[Any, dict[str, Tensor]]:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[32, 64],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=64,
        num_labels=70,
    )
    return transformers.SegformerForSemanticSegmentation(config), IMAGE


def whisper(transformers: Any) -> tuple[Any, dict[str, Tensor]]:
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=8,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    x = {
        "input_features": randn(1, config.num_mel_bins, 16),
        "decoder_input_ids": torch.tensor([[1, 5, 7]]),
    }
    return transformers.WhisperModel(config), x


#: Models, how x is quantised, and how many convolutions are packed. The files of segformer have
#: other names than its modules.
MODELS: dict[str, tuple[Any, str, int]] = {
    "convnext": (convnext, "none", 1),
    "resnet": (resnet, "block", 3),
    "mobilenet": (mobilenet, "none", 12),
    "segformer": (segformer, "token", 2),
    "whisper": (whisper, "block", 2),
}


def made(name: str) -> tuple[Any, Callable[[Any], Tensor]]:
    transformers = import_or_skip("transformers")
    torch.manual_seed(0)
    model, x = MODELS[name][0](transformers)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model.eval(), torch.no_grad()(lambda m: m(**x)[0])


@pytest.mark.parametrize("name", MODELS)
def test_models_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    _, act_quant, count = MODELS[name]
    model, run = made(name)
    plain = run(model)
    quantized(model, act_quant=act_quant)
    assert sum(issubclass(kind, co.nn.MixedConv) for kind in packed(model).values()) == count
    assert not any("classifier" in layer for layer in packed(model))
    expected = run(model)
    assert not torch.equal(expected, plain)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert packed(again) == packed(model)
    for layer in packed(model):
        assert all(
            torch.equal(t, again.get_submodule(layer)._buffers[part])
            for part, t in model.get_submodule(layer).packed.tensors().items()
        )
    assert torch.equal(run(again), expected)
    again.save_pretrained(tmp_path / "again")  # a loaded one, too
    second = load_file(tmp_path / "again" / "model.safetensors")
    assert second.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[key]) for key, tensor in second.items())


def test_weights_keep_their_dtype(tmp_path: Path) -> None:
    transformers = import_or_skip("transformers")
    model, _ = made("convnext")
    quantized(model, 8).save_pretrained(tmp_path)
    again = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path, dtype=torch.bfloat16
    )
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    for name, layer in packed(model).items():
        expected = model.get_submodule(name).packed.tensors()
        found = again.get_submodule(name).packed.tensors()
        assert isinstance(again.get_submodule(name), layer)
        assert all(
            torch.equal(t, expected[part]) and t.dtype == expected[part].dtype
            for part, t in found.items()
        )
    assert again(IMAGE["pixel_values"].bfloat16()).logits.isfinite().all()


def test_replaced_convolutions_are_saved_and_loaded(tmp_path: Path) -> None:
    model, run = made("resnet")
    layer = model.resnet.encoder.stages[1].layers[0].layer[1].convolution
    name = "resnet.encoder.stages.1.layers.0.layer.1.convolution"
    co.replace_convs(
        model, {name: co.reorder(co.quantize(layer.weight.detach(), 8, 64))}, act_quant="tensor"
    )
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert packed(again) == {name: co.nn.MixedConv2d}
    assert torch.equal(run(again), run(model))
    with pytest.raises(
        ValueError, match=f"'{name}' is packed with act_quant 'tensor', and 'none' is requested"
    ):
        quantized(again)


def test_the_files_say_their_kernels(tmp_path: Path) -> None:
    model, _ = made("resnet")
    quantized(model).save_pretrained(tmp_path)
    info = packed_info(tmp_path)
    layers = {name: model.get_submodule(name).packed for name in packed(model)}
    assert info.kernels == {name: weight.kernel_size for name, weight in layers.items()}
    assert info.weights == {name: (w.n, w.k, w.bits, w.group_size) for name, w in layers.items()}


def test_directories_without_packed_convolutions_load_as_before(tmp_path: Path) -> None:
    """Versions that packed linear layers alone did not name the convolutions that stayed."""
    model, run = made("convnext")
    quantized(model, convs=False).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    linears = [name for name in kept if not isinstance(model.get_submodule(name), nn.Conv2d)]
    assert linears == ["classifier"]
    assert len(kept) == 5
    config["quantization_config"]["modules_to_not_convert"] = linears
    file.write_text(json.dumps(config))
    again = type(model).from_pretrained(tmp_path)
    assert packed(again) == packed(model)
    assert torch.equal(run(again), run(model))


def test_a_packed_model_becomes_float_again(tmp_path: Path) -> None:
    model, run = made("convnext")
    kinds = {name: type(module) for name, module in model.named_modules()}
    expected = run(quantized(model, 8))
    model.dequantize()
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert (run(model) - expected).norm() <= 1e-5 * expected.norm()
    model.save_pretrained(tmp_path)
    assert torch.equal(run(type(model).from_pretrained(tmp_path)), run(model))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t, name: t.pop(f"{name}.codes"), r"the model has no place for .*\.scales"),
        (lambda t, name: t.pop(f"{name}.scales"), "scales' is not in the model's files"),
        (
            lambda t, name: t.update({f"{name}.codes": t[f"{name}.codes"][:-1]}),
            "ignore_mismatched_sizes",
        ),
        (lambda t, name: t[f"{name}.zeros"].fill_(9), "zeros' holds values outside of -8 .. 7"),
    ],
)
def test_damaged_files_are_refused(change: Any, match: str, tmp_path: Path) -> None:
    model, _ = made("convnext")
    quantized(model).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors, next(name for name, kind in packed(model).items() if kind is co.nn.MixedConv2d))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises((RuntimeError, ValueError), match=match):
        type(model).from_pretrained(tmp_path)


def test_a_plain_model_refuses_the_state_of_a_packed_one() -> None:
    plain, run = made("whisper")
    model = quantized(copy.deepcopy(plain))
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for encoder\.conv1\.weight"):
        plain.load_state_dict(state, strict=False)
    with pytest.raises(
        RuntimeError,
        match=r"encoder\.conv2\.weight is of a packed weight that is .*'kernel_size': \[3\]",
    ):
        quantized(copy.deepcopy(plain), 8).load_state_dict(state, strict=False)
    again = quantized(made("whisper")[0])
    again.load_state_dict(state)
    assert torch.equal(run(again), run(model))
