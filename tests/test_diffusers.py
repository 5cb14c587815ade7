"""Models of diffusers: packed in memory, saved, and loaded again by diffusers."""

from __future__ import annotations

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

import cutlass_ops as co
from cutlass_ops.files.packed_file import packed_info

# Parts of diffusers and what it imports warn of each other.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import diffusers
    except ImportError as error:
        pytest.skip(f"diffusers cannot be imported: {error}", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def flux() -> tuple[Any, Callable[[Any], Tensor]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    x = {
        "hidden_states": randn(1, 16, 16),
        "encoder_hidden_states": randn(1, 6, 32),
        "pooled_projections": randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }
    return model, lambda m: m(**x).sample


def unet() -> tuple[Any, Callable[[Any], Tensor]]:
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    return model, lambda m: m(randn(1, 4, 8, 8), 5, randn(1, 6, 32)).sample


def sd3() -> tuple[Any, Callable[[Any], Tensor]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
    )
    x = {
        "hidden_states": randn(1, 4, 8, 8),
        "encoder_hidden_states": randn(1, 6, 32),
        "pooled_projections": randn(1, 32),
    }
    return model, lambda m: m(**x, timestep=torch.tensor([5.0])).sample


def sdxl() -> tuple[Any, Callable[[Any], Tensor]]:
    """A UNet whose projections around attention are linear, and whose embeddings have the
    size of the image.
    """
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=32,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )
    added = {"text_embeds": randn(1, 32), "time_ids": torch.tensor([[64, 64, 0, 0, 64, 64]])}
    return model, lambda m: m(randn(1, 4, 8, 8), 5, randn(1, 6, 32), added_cond_kwargs=added).sample


def vae() -> tuple[Any, Callable[[Any], Tensor]]:
    model = diffusers.AutoencoderKL(block_out_channels=(64,), norm_num_groups=8)
    return model, lambda m: m(randn(1, 3, 16, 16)).sample


MODELS = {"flux": flux, "sd3": sd3, "sdxl": sdxl, "unet": unet, "vae": vae}


def made(name: str) -> tuple[Any, Callable[[Any], Tensor]]:
    torch.manual_seed(0)
    model, run = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    return model.eval(), torch.no_grad()(run)


def convolved(model: nn.Module) -> None:
    convs = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
        and module.in_channels >= 32
        and module.kernel_size == (3, 3)
    }
    assert convs
    co.replace_convs(
        model,
        {
            name: co.reorder(co.quantize(conv.weight.detach(), 8, 32))
            for name, conv in convs.items()
        },
    )


def packed(model: nn.Module) -> dict[str, type]:
    kinds = (co.MixedLinear, co.nn.MixedConv)
    return {
        name: type(module) for name, module in model.named_modules() if isinstance(module, kinds)
    }


#: Ways to pack a model: its linear layers; these by quantize_model and convolutions by
#: replace_convs; both by quantize_model.
WAYS: dict[str, Callable[[Any], object]] = {
    "linear": lambda model: co.quantize_model(model, bits=4, group_size=32),
    "replaced": lambda model: convolved(co.quantize_model(model, bits=4, group_size=32)),
    "convs": lambda model: co.quantize_model(model, bits=4, group_size=32, convs=True),
    "int8": lambda model: co.quantize_model(
        model, bits=8, group_size=32, act_quant="block", convs=True
    ),
}


@pytest.mark.filterwarnings("ignore:these stay as they are:UserWarning")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("flux", "linear"),
        ("sd3", "linear"),
        ("sdxl", "int8"),
        *((name, way) for name in ("unet", "vae") for way in WAYS),
    ],
)
def test_a_packed_model_is_saved_and_loaded(name: str, way: str, tmp_path: Path) -> None:
    model, run = made(name)
    plain = run(model)
    WAYS[way](model)
    assert any(issubclass(kind, co.nn.MixedConv) for kind in packed(model).values()) == (
        way != "linear"
    )
    assert not any(
        "conv_in" in layer or "conv_out" in layer for layer in packed(model) if way != "replaced"
    )
    expected = run(model)
    assert 0 < (expected - plain).norm() < 0.5 * plain.norm()
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert packed(again) == packed(model)
    assert torch.equal(run(again), expected)
    again.save_pretrained(tmp_path / "again")  # a loaded one, too
    assert torch.equal(run(type(model).from_pretrained(tmp_path / "again")), expected)


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_layer_is_packed(name: str) -> None:
    model, _ = made(name)
    co.quantize_model(model, 4, 32)  # a warning that names layers that stay would be an error
    assert [layer for layer, module in model.named_modules() if isinstance(module, nn.Linear)] == []


def test_projections_that_were_fused_before_are_packed_and_saved(tmp_path: Path) -> None:
    model, run = made("sd3")
    model.fuse_qkv_projections()
    co.quantize_model(model, 4, 32)
    expected = run(model)
    model.save_pretrained(tmp_path)  # the single projections too, which from_pretrained makes
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(run(again), expected)
    assert {name.split(".")[-2] for name in info["unexpected_keys"]} == {"to_qkv", "to_added_qkv"}
    with pytest.raises(AttributeError, match="MixedLinear has no 'weight'"):
        again.fuse_qkv_projections()


def test_a_pipeline_is_saved_and_loaded(tmp_path: Path) -> None:
    """Its models are of diffusers and of transformers."""
    transformers = import_or_skip("transformers")
    text = transformers.CLIPTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=2,
    )
    models = {
        "unet": made("unet")[0],
        "vae": made("vae")[0],
        "text_encoder": transformers.CLIPTextModel(text).eval(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in models.values():
            co.quantize_model(model, bits=8, group_size=32, act_quant="block", convs=True)
    absent = dict.fromkeys(("tokenizer", "safety_checker", "feature_extractor"))
    pipeline = diffusers.StableDiffusionPipeline(
        **models, **absent, scheduler=diffusers.DDIMScheduler(), requires_safety_checker=False
    )
    pipeline.save_pretrained(tmp_path)
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path, **absent)
    tokens, images = torch.tensor([[5, 9, 2]]), []
    for one in (pipeline, again):
        one.set_progress_bar_config(disable=True)
        words = one.text_encoder(tokens)[0]
        noise = {"latents": randn(1, 4, 8, 8), "num_inference_steps": 1, "guidance_scale": 1.0}
        images.append(one(prompt_embeds=words, **noise, output_type="pt").images)
    assert torch.equal(*images)
    assert {name: packed(getattr(again, name)) for name in models} == {
        name: packed(model) for name, model in models.items()
    }


def test_scales_keep_their_dtype(tmp_path: Path) -> None:
    model, _ = made("flux")
    co.quantize_model(model, bits=8, group_size=32)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    for name in packed(model):
        tensors = model.get_submodule(name).packed.tensors()
        for part, tensor in again.get_submodule(name).packed.tensors().items():
            assert torch.equal(tensor, tensors[part])
            assert tensor.dtype == tensors[part].dtype


def test_a_packed_model_becomes_float_again(tmp_path: Path) -> None:
    model, run = made("unet")
    kinds = {name: type(module) for name, module in model.named_modules()}
    co.quantize_model(model, bits=8, group_size=32)
    convolved(model)
    expected = run(model)
    model.dequantize()
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert (run(model) - expected).norm() <= 1e-5 * expected.norm()
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = type(model).from_pretrained(tmp_path)
    assert all(
        torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items()
    )
    assert (run(again) - expected).norm() <= 1e-5 * expected.norm()


def test_an_embedding_is_saved_and_loaded(tmp_path: Path) -> None:
    blocks = {
        "block_out_channels": (32, 32),
        "down_block_types": ("DownBlock2D",) * 2,
        "up_block_types": ("UpBlock2D",) * 2,
    }
    model: Any = diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, norm_num_groups=8, num_class_embeds=10, **blocks
    ).eval()
    co.quantize_model(model, 8, 32, embeddings=True)
    x = randn(1, 3, 8, 8)
    model.save_pretrained(tmp_path)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path)
    assert isinstance(again.class_embedding, co.nn.MixedEmbedding)
    with torch.no_grad():
        found, expected = (m(x, 3, class_labels=torch.tensor([7])).sample for m in (again, model))
    assert torch.equal(found, expected)
    again.dequantize()
    assert torch.equal(
        again.class_embedding.weight, model.class_embedding.dequantize(torch.float32)
    )
    model.class_embedding = co.nn.TiedEmbedding(model.time_embedding.linear_1)
    with pytest.raises(
        ValueError, match="tied embeddings are not saved in models of diffusers: class_embedding"
    ):
        co.quantize_model(model, 8, 32)


def test_layers_that_the_configuration_does_not_describe_are_not_saved(tmp_path: Path) -> None:
    model, _ = made("unet")
    co.quantize_model(model, bits=8, group_size=32, skip=("mid_block",))
    co.quantize_model(model.mid_block, bits=8, group_size=32)  # a part, which has no configuration
    with pytest.raises(
        ValueError, match=r"mid_block.*is packed, and the model's configuration does not say so"
    ):
        model.save_pretrained(tmp_path)
    co.quantize_model(model, bits=8, group_size=32)  # layers that are packed already are skipped
    model.save_pretrained(tmp_path)


def test_the_files_say_sizes_and_kernels(tmp_path: Path) -> None:
    model, run = made("unet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        co.quantize_model(model, bits=4, group_size=256, convs=True)
    model.save_pretrained(tmp_path)
    info = packed_info(tmp_path / "diffusion_pytorch_model.safetensors")
    layers = {name: model.get_submodule(name).packed for name in packed(model)}
    assert info.weights == {name: (w.n, w.k, w.bits, w.group_size) for name, w in layers.items()}
    assert info.kernels == {name: w.kernel_size for name, w in layers.items() if w.kernel_size}
    model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert torch.equal(run(type(model).from_pretrained(tmp_path / "shards")), run(model))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("proj_out.codes"), "the model's files lack proj_out.codes"),
        (
            lambda t: t.update({"proj_out.codes": torch.zeros(3, dtype=torch.uint8)}),
            r"'proj_out.codes' is \[3\]",
        ),
        (lambda t: t.update({"proj_out.scales": t["proj_out.scales"].double()}), "scales"),
    ],
)
def test_damaged_files_are_refused(change: Any, match: str, tmp_path: Path) -> None:
    model, _ = made("flux")
    co.quantize_model(model, bits=8, group_size=32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises((TypeError, ValueError), match=match):
        type(model).from_pretrained(tmp_path)


def test_a_model_of_another_method_is_refused() -> None:
    model, _ = made("flux")
    model.hf_quantizer = diffusers.quantizers.auto.TorchAoHfQuantizer.__new__(
        diffusers.quantizers.auto.TorchAoHfQuantizer
    )
    model.hf_quantizer.quantization_config = diffusers.QuantoConfig(weights_dtype="int8")
    with pytest.raises(ValueError, match="the model is quantised by quanto already"):
        co.quantize_model(model)
