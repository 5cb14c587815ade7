"""Adapters of PEFT on packed models: the gradients of the dequantised model, and errors for
unsupported operations.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from sizes import DECODER
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model

transformers = import_or_skip("transformers")
peft = import_or_skip("peft")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
SIZES = {**DECODER, "vocab_size": 160, "initializer_range": 0.2}
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with dequantised weights, and the same packed in a directory."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    folder = tmp_path_factory.mktemp("peft")
    model.save_pretrained(folder / "float")
    reorder_model(co.load_checkpoint(folder / "float"), folder / "packed", Options(4, 32, False))
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight.copy_(
                    co.dequantize(co.quantize(layer.weight, 4, 32, False), torch.float32)
                )
    return model, folder / "packed"


def packed(models: tuple[Any, Path], fuse: bool = False) -> Any:
    return co.load_model(models[1], fuse=fuse)


def adapted(model: Any, **options: Any) -> Any:
    """The model with adapters whose every value is another, the same for the same names."""
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": NAMES, "task_type": "CAUSAL_LM", **options}
    )
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for i, (_, parameter) in enumerate(adapters(model)):
            parameter.copy_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            )
    return model


def adapters(model: Any) -> list[tuple[str, nn.Parameter]]:
    return sorted(
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )


def gradients(model: Any) -> dict[str, Tensor]:
    tokens = TOKENS.to(model.device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {name: parameter.grad for name, parameter in adapters(model)}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=TOKENS).logits
    return result


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("target_modules", [NAMES, "all-linear"], ids=["names", "all-linear"])
@pytest.mark.parametrize(
    "checkpointing", [None, False, True], ids=["kept", "not reentrant", "reentrant"]
)
def test_gradients_are_those_of_the_dequantised_model(
    models: tuple[Any, Path], target_modules: Any, fuse: bool, checkpointing: bool | None
) -> None:
    expected = gradients(adapted(copy.deepcopy(models[0]), target_modules=target_modules))
    model = adapted(packed(models, fuse), target_modules=target_modules)
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    model.train()
    found = gradients(model)
    assert len(found) == 2 * 7 * 2
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


@pytest.mark.parametrize("fuse", [False, True])
def test_the_loss_falls_and_the_adapter_is_saved(
    models: tuple[Any, Path], fuse: bool, tmp_path: Path
) -> None:
    model = packed(models, fuse)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW([p for _, p in adapters(model)], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(a > b for a, b in itertools.pairwise(losses))

    model.eval()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(packed(models, fuse), tmp_path).eval()
    assert torch.equal(logits(again), logits(model))
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(packed(models, fuse)))
    unloaded = model.unload()
    assert all(torch.equal(tensor, before[name]) for name, tensor in unloaded.state_dict().items())


def test_an_adapter_of_an_unfused_model_serves_a_fused_one(
    models: tuple[Any, Path], tmp_path: Path
) -> None:
    model = adapted(packed(models)).eval()
    model.save_pretrained(tmp_path)
    fused = peft.PeftModel.from_pretrained(packed(models, fuse=True), tmp_path)
    torch.testing.assert_close(logits(fused), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_bf16_model(models: tuple[Any, Path], fuse: bool, device: str) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.bfloat16).to(
        device
    )
    if fuse:
        co.fuse_linears(base)
    model = adapted(base)
    assert {(parameter.dtype, parameter.device.type) for _, parameter in adapters(model)} == {
        (torch.float32, device)
    }
    expected = gradients(adapted(copy.deepcopy(models[0])))
    for name, gradient in gradients(model).items():
        assert (gradient.cpu() - expected[name]).norm() <= 0.1 * expected[name].norm(), name


def test_all_linear_leaves_a_packed_head_alone(models: tuple[Any, Path]) -> None:
    model = packed(models)
    co.replace_linears(
        model, {"lm_head": co.reorder(co.quantize(model.lm_head.weight.detach(), 8, 32))}
    )
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert len(adapters(model)) == 2 * 7 * 2
    assert isinstance(model.base_model.model.lm_head, co.MixedLinear)
    # A second adapter takes the same layers.
    model.add_adapter("other", peft.LoraConfig(target_modules="all-linear"))
    assert not any("base_layer" in name for name in model.peft_config["other"].target_modules)


#: Methods besides plain LoRA, by the options of their configurations.
METHODS: dict[str, Any] = {
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules="all-linear"),
    "dora with dropout": lambda: peft.LoraConfig(
        r=4, use_dora=True, lora_dropout=0.1, target_modules=NAMES
    ),
    "ia3": lambda: peft.IA3Config(target_modules=NAMES, feedforward_modules=["down_proj"]),
    "miss": lambda: peft.MissConfig(r=4, target_modules=NAMES),
    "oft": lambda: peft.OFTConfig(oft_block_size=16, target_modules="all-linear"),
    "vera": lambda: peft.VeraConfig(r=8, target_modules="all-linear"),
}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    """A function that makes the configuration of a method."""
    if request.param == "oft" and not hasattr(
        import_module("peft.tuners.oft.model"), "resolve_quantization_backend"
    ):
        pytest.skip("this version of PEFT has OFT for the layers of the packages that it knows")
    utils = import_module("peft.utils.quantization_utils")
    if (
        request.param in ("miss", "vera")
        and find_spec("torchao")
        and not hasattr(utils, "is_torchao_ge_v0_18_0")
    ):
        pytest.skip(
            "this version of PEFT imports what torchao 0.18 does not have, for float layers"
        )
    return METHODS[request.param]


def trained(model: Any, config: Any) -> tuple[Any, list[float]]:
    """A model with an adapter after some steps, and the losses."""
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for _, p in adapters(model)], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), losses


@pytest.mark.parametrize("fuse", [False, True])
def test_other_methods_train_as_on_the_dequantised_model(
    models: tuple[Any, Path], method: Any, fuse: bool, tmp_path: Path
) -> None:
    model, losses = trained(packed(models, fuse), method())
    expected, expected_losses = trained(copy.deepcopy(models[0]), method())
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    assert losses[-1] < 0.95 * losses[0]
    assert (logits(model) - logits(expected)).norm() <= 1e-2 * logits(expected).norm()

    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(packed(models, fuse), tmp_path).eval()
    assert torch.equal(logits(again), logits(model))
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(packed(models, fuse)))
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(RuntimeError, match="cannot be merged into a packed weight"):
            merge()


def test_other_methods_of_a_bf16_model(models: tuple[Any, Path], method: Any) -> None:
    model, losses = trained(co.load_model(models[1], dtype=torch.bfloat16), method())
    assert losses[-1] < losses[0]
    assert logits(model).dtype == torch.bfloat16


def test_norms_of_dora_are_right_with_biases() -> None:
    torch.manual_seed(0)
    # PEFT looks for the device of a parameter
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    co.quantize_model(model, 4, 32)
    plain = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    plain[0].load_state_dict(
        {"weight": co.dequantize(model[0].packed, torch.float32), "bias": model[0].bias}
    )
    adapted_models = []
    for each in (model, plain):
        torch.manual_seed(1)
        each = peft.get_peft_model(
            each, peft.LoraConfig(r=4, use_dora=True, init_lora_weights=False, target_modules=["0"])
        )
        each.base_model.model[0].lora_magnitude_vector["default"].weight.data *= torch.linspace(
            0.5, 2, 64
        )
        adapted_models.append(each)
    x = torch.randn(3, 64)
    y, expected = (each(x) for each in adapted_models)
    assert (y - expected).norm() <= 1e-5 * expected.norm()


def test_merging_is_refused(models: tuple[Any, Path]) -> None:
    model = adapted(packed(models))
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(RuntimeError, match="cannot be merged into a packed weight"):
            merge()


def test_merging_is_refused_before_float_layers_are_merged(models: tuple[Any, Path]) -> None:
    model = adapted(packed(models), target_modules=["embed_tokens", "q_proj"])
    embedding = model.get_input_embeddings()
    before = embedding.weight.clone()
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(RuntimeError, match="cannot be merged into a packed weight"):
            merge()
        assert model.get_input_embeddings() is embedding
        assert torch.equal(embedding.weight, before)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize("fuse", [False, True])
def test_biases_of_packed_layers_that_would_be_trained_are_refused(bias: str, fuse: bool) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True))
    co.quantize_model(model, 4, 32)
    if fuse:
        co.fuse_linears(model)
    name = r"model\.layers\.0\.self_attn\.q_proj"
    with pytest.raises(ValueError, match=f"bias is '{bias}', and the bias of {name} is a buffer"):
        adapted(model, target_modules=["q_proj"], bias=bias)
    assert not any("lora" in name for name, _ in model.named_modules())
    if bias == "lora_only":  # layers without biases
        adapted(model, target_modules=["down_proj"], bias=bias)


@pytest.mark.parametrize("tied", [False, True])
def test_modules_to_save_are_no_packed_layers(tied: bool) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config)
    co.quantize_model(model, 4, 32, embeddings=True)
    for name, kind in {
        "embed_tokens": "TiedEmbedding" if tied else "MixedEmbedding",
        "o_proj": "MixedLinear",
    }.items():
        with pytest.raises(
            ValueError, match=rf"modules_to_save has '{name}', and \S+{name} is packed \({kind}\)"
        ):
            adapted(model, target_modules=["q_proj"], modules_to_save=[name])
    adapted(model, target_modules=["q_proj"], modules_to_save=["norm"])


def test_an_adapter_is_merged_into_a_model_that_was_made_float(
    models: tuple[Any, Path], tmp_path: Path
) -> None:
    model = adapted(packed(models)).eval()
    model.save_pretrained(tmp_path)
    merged = peft.PeftModel.from_pretrained(
        packed(models).dequantize(), tmp_path
    ).merge_and_unload()
    assert (logits(merged) - logits(model)).norm() <= 1e-5 * logits(model).norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True, "use_bdlora": peft.tuners.lora.BdLoraConfig()}, "use_dora"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights is 'pissa', which needs the weight's values",
        ),
        (
            {"init_lora_weights": "olora"},
            "init_lora_weights is 'olora', which needs the weight's values",
        ),
    ],
    ids=["bdlora", "pissa", "olora"],
)
def test_variants_that_need_the_weight_are_refused(
    models: tuple[Any, Path], options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        adapted(packed(models), **options)


def test_a_layer_whose_children_alone_are_called_is_refused(models: tuple[Any, Path]) -> None:
    kinds = (peft.LoraConfig, peft.IA3Config, peft.VeraConfig)
    for kind in kinds:
        options = {"feedforward_modules": []} if kind is peft.IA3Config else {}
        with pytest.raises(
            ValueError,
            match=r"called by q_proj, k_proj, v_proj alone.*name those in target_modules",
        ):
            peft.get_peft_model(
                packed(models, fuse=True), kind(target_modules=["qkv_proj"], **options)
            )


def test_other_methods_say_that_they_do_not_know_packed_layers(models: tuple[Any, Path]) -> None:
    with pytest.raises(TypeError, match=r"Target module .*MixedLinear.* not supported"):
        peft.get_peft_model(packed(models), peft.LoHaConfig(target_modules=NAMES))


def test_transformers_trains_adapters_and_nothing_else(models: tuple[Any, Path]) -> None:
    trainer_utils = import_or_skip("transformers.trainer_utils")
    model = transformers.AutoModelForCausalLM.from_pretrained(models[1])
    assert model.hf_quantizer.is_trainable
    with pytest.raises(ValueError, match="purely quantized models"):
        trainer_utils.validate_quantization_for_training(model)
    trainer_utils.validate_quantization_for_training(adapted(model))
    model = transformers.AutoModelForCausalLM.from_pretrained(models[1])
    model.add_adapter(peft.LoraConfig(target_modules=NAMES))
    trainer_utils.validate_quantization_for_training(model)
    assert gradients(model).keys() == dict(adapters(model)).keys()


@pytest.mark.slow
def test_registered_where_peft_was_imported_first() -> None:
    """The tests above import it last."""
    program = (
        "import peft, cutlass_ops, sys, torch\n"
        "assert 'cutlass_ops.integrations.peft_lora' in sys.modules\n"
        "layer = "
        "cutlass_ops.MixedLinear(cutlass_ops.reorder(cutlass_ops.quantize(torch.randn(64, 128))))\n"
        "model = torch.nn.Sequential(layer, torch.nn.Linear(64, 1))\n"
        "model = peft.get_peft_model(model, peft.LoraConfig(target_modules=['0']))\n"
        "print(type(model.base_model.model[0]).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "PackedLoraLinear\n", done.stderr
