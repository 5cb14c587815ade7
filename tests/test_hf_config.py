"""CutlassOpsConfig: from_pretrained quantises a float model as quantize_model does, or
says why it cannot.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import save_file
from sizes import DECODER as LLAMA

import cutlass_ops as co
from cutlass_ops.nn import quantize_model

transformers = import_or_skip("transformers")
hf_on_load = import_or_skip("cutlass_ops.integrations.hf_on_load")
hf_quantizer = import_or_skip("cutlass_ops.integrations.hf_quantizer")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
COMMON = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}
EXPERTS = {**LLAMA, "moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2}
T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
AUTO = "AutoModelForCausalLM"

pytestmark = pytest.mark.filterwarnings("ignore:these stay as they are")


def write(path: Path, family: str = "Llama", auto: str = AUTO, **options: Any) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **(options or LLAMA)})
    getattr(transformers, auto).from_config(config).save_pretrained(path)
    return path


def load(path: Path, *, auto: str = AUTO, **options: Any) -> Any:
    return getattr(transformers, auto).from_pretrained(path, **options)


def assert_same(found: Any, expected: Any) -> None:
    """The same layers with the same bits and the same configuration."""
    a, b = found.state_dict(), expected.state_dict()
    assert list(a) == list(b)
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[name].dtype, name
            assert torch.equal(value, b[name]), name
        else:
            assert value == b[name], name
    assert [type(module) for module in found.modules()] == [
        type(module) for module in expected.modules()
    ]
    assert found.config.to_dict() == expected.config.to_dict()
    assert [module.training for module in found.modules()] == [
        module.training for module in expected.modules()
    ]
    assert found.hf_quantizer.pre_quantized


BOOK = torch.linspace(-1, 1, 16) ** 3


@pytest.mark.parametrize(
    ("family", "auto", "sizes", "options", "loading"),
    [
        ("Llama", AUTO, LLAMA, {}, {}),
        (
            "Llama",
            AUTO,
            LLAMA,
            {"bits": 8, "group_size": 32, "symmetric": True, "act_quant": "block"},
            {"device_map": "auto"},
        ),
        (
            "Llama",
            AUTO,
            {**LLAMA, "tie_word_embeddings": True},
            {"group_size": 64, "embeddings": True},
            {"device_map": "cpu"},
        ),
        (
            "Llama",
            AUTO,
            LLAMA,
            {"group_size": 32, "book": BOOK, "skip": ()},
            {"device_map": {"": "cpu"}},
        ),
        (
            "Llama",
            AUTO,
            LLAMA,
            {"group_size": 32, "clip": "mse", "skip": ("layers.0",)},
            {"dtype": torch.bfloat16},
        ),
        (
            "GPT2",
            AUTO,
            {"n_embd": 64, "n_layer": 2, "n_head": 4},
            {"bits": 8, "act_quant": "token"},
            {"dtype": torch.float16},
        ),
        ("Qwen3Moe", AUTO, EXPERTS, {"group_size": 32, "book": "nf4"}, {}),
        # wo stays fp32, and is not packed.
        ("T5", "AutoModelForSeq2SeqLM", T5, {"group_size": 32}, {"dtype": torch.float16}),
    ],
)
def test_the_model_is_that_of_quantize_model(
    family: str,
    auto: str,
    sizes: dict[str, Any],
    options: dict[str, Any],
    loading: dict[str, Any],
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "float", family, auto, **sizes)
    config = co.CutlassOpsConfig(**options)
    found = load(path, auto=auto, quantization_config=config, **loading)
    expected = co.quantize_model(load(path, auto=auto, **loading), **options)
    assert_same(found, expected)
    assert repr(config).startswith("CutlassOpsConfig {")
    found.save_pretrained(tmp_path / "packed")
    loaded = load(tmp_path / "packed", auto=auto, dtype=found.dtype).state_dict()
    saved = {
        name: value for name, value in found.state_dict().items() if isinstance(value, torch.Tensor)
    }
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


@pytest.mark.parametrize(
    ("family", "sizes"), [("Llama", LLAMA), ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4})]
)
def test_one_layer_at_a_time_is_float(
    family: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, family, **sizes)
    before: list[Any] = []

    def packed_layer(layer: Any, **options: Any) -> Any:
        assert all(parameter.is_meta for other in before for parameter in other.parameters())
        before.append(layer)
        return quantize_model.packed_layer(layer, **options)

    monkeypatch.setattr(hf_on_load, "packed_layer", packed_layer)
    model = load(path, quantization_config=co.CutlassOpsConfig(group_size=32))
    assert len(before) == sum(isinstance(module, co.MixedLinear) for module in model.modules()) > 7


def test_a_map_of_several_devices_quantises_after_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    expected = load(path, quantization_config=co.CutlassOpsConfig(group_size=32))
    validate = hf_quantizer.CutlassOpsQuantizer.validate_environment

    def on_two(self: Any, **options: Any) -> None:
        validate(self, **{**options, "device_map": {"model": 0, "lm_head": 1}})

    monkeypatch.setattr(hf_quantizer.CutlassOpsQuantizer, "validate_environment", on_two)
    monkeypatch.setattr(hf_on_load, "packed_layer", None)
    assert_same(load(path, quantization_config=co.CutlassOpsConfig(group_size=32)), expected)


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = load(write(tmp_path / "float"))
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(
        ValueError, match=r"'model\.layers\.1\.mlp\.up_proj': the weight has NaN or infinite values"
    ):
        load(tmp_path / "nan", quantization_config=co.CutlassOpsConfig())


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_the_files_lack_is_initialised_as_in_a_float_model(tmp_path: Path) -> None:
    path = write(tmp_path / "float", "GPT2", n_embd=64, n_layer=1, n_head=4)
    lacking = load(path).state_dict()
    del (
        lacking["transformer.h.0.mlp.c_fc.bias"],
        lacking["transformer.h.0.mlp.c_proj.weight"],
        lacking["lm_head.weight"],
    )
    save_file(lacking, path / "model.safetensors", {"format": "pt"})
    results = []
    for quantise in (True, False):
        torch.manual_seed(0)
        config = co.CutlassOpsConfig(group_size=32) if quantise else None
        model = load(path, quantization_config=config)
        results.append(model if quantise else co.quantize_model(model, group_size=32))
    assert_same(*results)


def test_a_dictionary_does_the_same(tmp_path: Path) -> None:
    path = write(tmp_path)
    fields = {"quant_method": "cutlass_ops", "group_size": 32, "book": BOOK.tolist()}
    assert_same(
        load(path, quantization_config=fields),
        co.quantize_model(load(path), group_size=32, book=BOOK),
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 3}, ValueError, "bits is 3"),
        ({"group_size": 100}, ValueError, "group_size is 100"),
        ({"symmetric": 1}, TypeError, "symmetric is 1; True or False is expected"),
        (
            {"act_quant": "row"},
            ValueError,
            "act_quant is 'row'; supported are 'none', 'token' and 'block'",
        ),
        (
            {"act_quant": "token", "book": "nf4"},
            ValueError,
            "act_quant is 'token'; with a code book it is 'none'",
        ),
        ({"skip": "lm_head"}, TypeError, "skip is 'lm_head'; a tuple of module names is expected"),
        ({"book": "nf5"}, ValueError, "book is 'nf5'"),
        ({"book": [0.0, 1.0]}, ValueError, "16"),
        ({"clip": "max"}, ValueError, "clip is 'max'"),
        ({"convs": 1}, TypeError, "convs is 1"),
        ({"embeddings": None}, TypeError, "embeddings is None"),
        ({"groupsize": 32}, TypeError, "groupsize"),
    ],
)
def test_wrong_options_are_refused_at_once(
    options: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        co.CutlassOpsConfig(**options)


@pytest.fixture
def unread(tmp_path: Path) -> Path:
    """A model whose weights cannot be read."""
    path = write(tmp_path / "unread")
    (path / "model.safetensors").write_bytes(b"no header")
    return path


def test_a_name_to_skip_that_the_model_lacks_is_refused_before_weights_are_read(
    unread: Path,
) -> None:
    with pytest.raises(
        ValueError, match=r"skip has 'layers.7'; the model has no module of that name"
    ):
        load(
            unread, quantization_config=co.CutlassOpsConfig(skip=("layers.7",)), dtype=torch.float32
        )


@pytest.mark.parametrize("places", [("disk",), ("cpu", "disk"), ("cpu", 0), (0, "disk")])
def test_offloading_is_refused_before_weights_are_read(
    places: tuple[Any, ...], unread: Path
) -> None:
    device_map = (
        dict(zip(("model", "lm_head"), places, strict=False))
        if len(places) > 1
        else {"": places[0]}
    )
    with pytest.raises(
        ValueError,
        match=f"device_map has {', '.join(sorted(map(str, places)))}: weights that are offloaded",
    ):
        load(unread, quantization_config=co.CutlassOpsConfig(), device_map=device_map)


def test_a_map_that_transformers_makes_is_checked(unread: Path) -> None:
    with pytest.raises(ValueError, match="device_map has disk: weights that are offloaded"):
        load(
            unread,
            quantization_config=co.CutlassOpsConfig(),
            device_map="auto",
            max_memory={"cpu": 0},
            dtype=torch.float32,
            offload_folder=unread / "offload",
        )


def test_a_model_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "float")
    config = co.CutlassOpsConfig(group_size=32)
    load(path, quantization_config=config).save_pretrained(tmp_path / "packed")
    with pytest.raises(
        ValueError, match="quantized with PackedModelConfig but you are passing a CutlassOpsConfig"
    ):
        load(tmp_path / "packed", quantization_config=config)
    model_config = transformers.AutoConfig.from_pretrained(path)
    model_config.quantization_config = config.to_dict()
    with pytest.raises(
        ValueError,
        match="quantization_config says how to quantise it, and not what is packed in its files",
    ):
        load(path, config=model_config)


def test_tensors_of_other_sizes_are_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(write(tmp_path))
    config.intermediate_size = 64
    compares = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
    message = "ignore_mismatched_sizes" if compares else r"\[96, 64\]; the model's is \[64, 64\]"
    with pytest.raises(RuntimeError if compares else ValueError, match=message):
        load(tmp_path, config=config, quantization_config=co.CutlassOpsConfig())


def test_layers_in_two_places_and_of_another_dtype(tmp_path: Path) -> None:
    class Model(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers[0].mlp.up_proj.float()
            self.model.layers[0].self_attn.q_proj = self.model.layers[1].self_attn.q_proj

    options = {"dtype": torch.float16}
    path = write(tmp_path)
    found = Model.from_pretrained(
        path, quantization_config=co.CutlassOpsConfig(group_size=32), **options
    )
    assert_same(found, co.quantize_model(Model.from_pretrained(path, **options), group_size=32))


def test_a_model_without_layers_to_quantise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the model has no linear layer to quantise"):
        load(write(tmp_path), quantization_config=co.CutlassOpsConfig(skip=("model", "lm_head")))


def test_adapters_train_as_on_a_model_of_quantize_model(tmp_path: Path) -> None:
    peft = import_or_skip("peft")
    path = write(tmp_path)
    results = []
    for model in (
        load(path, quantization_config=co.CutlassOpsConfig(group_size=32)),
        co.quantize_model(load(path), group_size=32),
    ):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        )
        adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
        results.append(
            {
                name: value.grad
                for name, value in adapted.named_parameters()
                if value.grad is not None
            }
        )
    assert len(results[0]) == 28
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(gradient, results[1][name]) for name, gradient in results[0].items())


def test_a_model_becomes_float_again(tmp_path: Path) -> None:
    path = write(tmp_path)
    model = load(path, quantization_config=co.CutlassOpsConfig(group_size=32))
    with torch.inference_mode():
        expected = model(input_ids=TOKENS).logits
        model.dequantize()
        found = model(input_ids=TOKENS).logits
    assert not any(isinstance(module, co.MixedLinear) for module in model.modules())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_without_transformers_the_class_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "cutlass_ops.integrations.hf_config")
    monkeypatch.setitem(sys.modules, "transformers.utils.quantization_config", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"CutlassOpsConfig needs it: pip install 'cutlass_ops\[hf\]'"
    ):
        _ = co.CutlassOpsConfig
    with pytest.raises(AttributeError, match="has no attribute 'Config'"):
        _ = co.Config


def test_layers_that_stay_are_warned_of(tmp_path: Path) -> None:
    path = write(tmp_path, "Mamba", hidden_size=32, num_hidden_layers=1, state_size=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(path, quantization_config=co.CutlassOpsConfig())
    assert [w for w in caught if "MambaMixer reads the weight itself" in str(w.message)]
