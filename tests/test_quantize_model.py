"""quantize_model: which layers become packed, their results, and refusals."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from quantized_models import fail, mlp, packed_names
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, weight_norm
from warned import said

import cutlass_ops as co
from cutlass_ops import files
from cutlass_ops.files import conversion_plan
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.nn import progress
from cutlass_ops.nn import quantize_model as module


# Parts of transformers, torch and accelerate warn of each other.
def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# ---- what the layers compute


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bits": 8, "group_size": 32, "symmetric": True},
        {"group_size": -1, "act_quant": "token"},
        {"group_size": 64, "act_quant": "block", "clip": "mse"},
        {"group_size": 64, "book": "nf4"},
        {"group_size": 32, "book": torch.linspace(-1, 1, 16)},
    ],
)
def test_every_layer_is_the_packed_one(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = mlp(dtype)
    before = copy.deepcopy(model)
    with said():
        assert co.quantize_model(model, **options) is model
    options = {"group_size": 128, "symmetric": False, **options}
    act_quant = options.pop("act_quant", "none")
    for name in ("0", "3"):
        layer, linear = model.get_submodule(name), before.get_submodule(name)
        assert isinstance(layer, co.MixedLinear)
        assert isinstance(linear, nn.Linear)
        packed = co.reorder(co.quantize(linear.weight, **options))
        assert layer.packed.tensors().keys() - {"bias"} == packed.tensors().keys()
        for part, tensor in packed.tensors().items():
            assert torch.equal(getattr(layer, part), tensor)
            assert getattr(layer, part).dtype == tensor.dtype
        assert layer.scales.dtype == dtype
        assert layer.act_quant == act_quant
        x = randn(2, 3, linear.in_features, dtype=dtype)
        assert torch.equal(layer(x), co.mixed_gemm(x, packed, linear.bias, act_quant=act_quant))
    x = randn(4, 96, dtype=dtype)
    assert (model(x).float() - before(x).float()).norm() <= 0.3 * before(x).float().norm()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 200), (65, 1), (3, 129)])
def test_any_size(n: int, k: int) -> None:
    model = nn.Sequential(nn.Linear(k, n))
    x = randn(5, k)
    expected = model(x)
    co.quantize_model(model, 8, 32)
    assert model(x).shape == (5, n)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0.02)


def test_bias_mode_and_skipped_layers_are_kept() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 8), "b": nn.Embedding(4, 32), "c": nn.Linear(32, 4)})
    model["a"].eval()
    model["c"].requires_grad_(False)
    bias, table = model["a"].bias.detach().clone(), model["b"].weight
    co.quantize_model(model, skip=("c",))
    assert packed_names(model) == ["a"]
    assert not model["a"].training
    assert model["c"].training
    assert torch.equal(model["a"].bias, bias)
    assert model["b"].weight is table
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == [
        ("b.weight", True),
        ("c.weight", False),
        ("c.bias", False),
    ]
    restored = co.quantize_model(
        nn.ModuleDict({"a": nn.Linear(32, 8), "b": nn.Embedding(4, 32), "c": nn.Linear(32, 4)})
    )
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        restored.load_state_dict(model.state_dict())
    co.quantize_model(model)
    restored.load_state_dict(model.state_dict())
    assert torch.equal(restored["a"](randn(2, 32)), model["a"](randn(2, 32)))


def test_layers_that_are_packed_already_are_passed_over() -> None:
    model = co.quantize_model(mlp(), 8, 32)
    first = model[0]
    assert co.quantize_model(model, 4, 64) is model
    assert model[0] is first
    model.append(nn.Linear(33, 5))
    co.quantize_model(model, 4, 64)
    assert model[0] is first
    assert isinstance(model[4], co.MixedLinear)


def test_a_module_in_several_places_is_one_packed_layer() -> None:
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": nn.Sequential(shared, shared), "b": shared})
    with said():
        co.quantize_model(model, 8, 32)
    assert model["a"][0] is model["a"][1] is model["b"]
    assert isinstance(model["b"], co.MixedLinear)
    with said():
        assert packed_names(
            co.quantize_model(nn.ModuleDict({"a": mlp(), "b": mlp()}), skip=("b",))
        ) == ["a.0", "a.3"]


# ---- layers that stay


def test_skip() -> None:
    def names(*skip: str) -> list[str]:
        layers = {
            str(i): nn.ModuleDict({"mlp": mlp(), "lm_head": nn.Linear(8, 8)}) for i in (0, 1, 10)
        }
        model = nn.ModuleDict({"layers": nn.ModuleDict(layers)})
        with said():
            return packed_names(co.quantize_model(model, skip=skip))

    assert names("lm_head", "layers.1") == [
        "layers.0.mlp.0",
        "layers.0.mlp.3",
        "layers.10.mlp.0",
        "layers.10.mlp.3",
    ]
    assert names("lm_head", "mlp.0", "10") == ["layers.0.mlp.3", "layers.1.mlp.3"]
    assert names("layers.0.mlp.0", "lm_head", "layers.10", "mlp.3") == ["layers.1.mlp.0"]


def test_attention_and_encoder_layers_of_torch_are_right_in_their_fast_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0)
    model = nn.Sequential(
        nn.Linear(32, 32),
        nn.TransformerEncoder(layer, 2),
        nn.MultiheadAttention(32, 4),
        nn.Linear(32, 8),
    )
    model.eval()
    before = copy.deepcopy(model)
    with said(
        "NonDynamicallyQuantizableLinear is a subclass of torch.nn.Linear: "
        "1.layers.0.self_attn.out_proj",
        "TransformerEncoderLayer reads the weight itself: 1.layers.0.linear1, 1.layers.0.linear2, "
        "1.layers.1.linear1",
    ):
        co.quantize_model(model, 8, 32)
    assert packed_names(model) == ["0", "3"]
    x = randn(2, 5, 32)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for keep in (None, padding):
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model[3](model[1](model[0](x), src_key_padding_mask=keep))
            expected = before[3](before[1](before[0](x), src_key_padding_mask=keep))
        assert (found - expected).norm() <= 0.03 * expected.norm()


class Reader(nn.Module):
    """Reads weights of the layers in it in every way that is found."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.inner = nn.Linear(32, 32), nn.Module()
        self.inner.deep, self.written = nn.Linear(32, 32), nn.Linear(32, 32)
        self.listed = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.named = nn.ModuleDict({"k": nn.Linear(32, 32)})
        self.by_property, self.nested = nn.Linear(32, 32), nn.Linear(32, 32)
        self.called, self.asked, self.initialised = (
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )
        self.looped = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)}) for _ in range(2)
        )
        self.zipped, self.items = (
            nn.ModuleList([nn.Linear(32, 32)]),
            nn.ModuleDict({"k": nn.Linear(32, 32)}),
        )
        self.passed, self.by_keyword, self.not_passed = (
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )
        self.variable, self.chosen, self.named_in_text = (
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
        )
        self.initialised.weight.data.zero_()

    def _init_weights(self) -> None:
        self.initialised.weight.data.zero_()

    @property
    def dtype(self) -> torch.dtype:
        return self.by_property.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        self.written.weight = self.plain.weight
        rows = [self.nested.weight[i] for i in range(2)]
        x = x @ self.inner.deep.weight + self.listed[1].weight.sum() + rows[0]
        layer = self.variable
        other = layer if len(x) else self.chosen
        x = x + other.weight + sum(block["a"].weight for block in self.looped)
        for _, (first, size) in enumerate(zip(self.zipped, (1,), strict=True)):
            x = x + size * first.weight
        for _, layer in self.items.items():
            x = x + layer.weight
        x = self.not_passed(x) + self.add(x, self.passed) + self.add(x, layer=self.by_keyword)
        x = x @ getattr(self, "named_in_text").weight  # noqa: B009
        return F.linear(self.called(x), self.named["k"].weight.t())

    def add(self, x: Tensor, layer: Any) -> Tensor:
        return x + self.again(layer, x)

    @staticmethod
    def again(layer: Any, x: Tensor) -> Tensor:
        return x + layer.weight

    def target(self) -> torch.dtype:
        return torch.float16 if hasattr(self, "_is_quantized") else self.asked.weight.dtype


class Inherits(Reader):
    pass


def test_layers_whose_weight_a_module_reads_stay() -> None:
    read = ("plain", "inner.deep", "written", "listed.1", "named.k", "by_property", "nested")
    read += (
        "looped.0.a",
        "looped.1.a",
        "zipped.0",
        "items.k",
        "passed",
        "by_keyword",
        "variable",
        "chosen",
        "named_in_text",
    )
    with said(
        "these stay as they are: Inherits reads the weight itself: "
        + ", ".join(f"1.{name}" for name in read)
    ):
        model = co.quantize_model(nn.Sequential(nn.Linear(32, 32), Inherits()))
    left = ("listed.0", "called", "asked", "initialised", "looped.0.b", "looped.1.b", "not_passed")
    assert packed_names(model) == ["0", *(f"1.{name}" for name in left)]
    with pytest.raises(AttributeError, match="weight"):
        _ = model[0].weight  # other reads of the weight raise an error


def parametrized() -> nn.Module:
    return parametrizations.orthogonal(nn.Linear(32, 32))


def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weight_norm(nn.Linear(32, 32))


def hooked(register: str, hook: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        linear = nn.Linear(32, 32)
        getattr(linear, register)(hook)
        return linear

    return make


def patched() -> nn.Module:
    linear = nn.Linear(32, 32)
    linear.forward = lambda x: x
    return linear


class Subclass(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (parametrized, "ParametrizedLinear is a subclass of torch.nn.Linear: 1"),
        (normed, "the parameters are bias, weight_g, weight_v, not weight and bias: 1"),
        (
            hooked("register_forward_hook", lambda layer, args, y: y + layer.weight.sum()),
            "hooks are registered: 1",
        ),
        (
            hooked("register_forward_pre_hook", lambda layer, args: (2 * args[0],)),
            "hooks are registered: 1",
        ),
        (
            hooked("register_full_backward_hook", lambda layer, of_x, of_y: (2 * of_x[0],)),
            "hooks are registered: 1",
        ),
        (
            hooked("register_full_backward_pre_hook", lambda layer, of_y: (2 * of_y[0],)),
            "hooks are registered: 1",
        ),
        (patched, "the layer's forward was replaced: 1"),
        (lambda: Subclass(32, 32), "Subclass is a subclass of torch.nn.Linear: 1"),
        (lambda: nn.Linear(32, 32).double(), "the weight is float64: 1"),
        (lambda: nn.Linear(32, 32).to(torch.float8_e4m3fn), "the weight is float8_e4m3fn: 1"),
    ],
)
def test_layers_that_stay_in_floating_point_are_named_in_a_warning(
    make: Callable[[], nn.Module], message: str
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), make())
    left = model[1]
    with said(message):
        co.quantize_model(model)
    assert packed_names(model) == ["0"]
    assert model[1] is left
    with said():  # no warning for layers that the user named
        co.quantize_model(nn.Sequential(nn.Linear(32, 32), make()), skip=("1",))
    assert not parametrize.is_parametrized(model[0])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_an_empty_layer_is_left() -> None:
    model = nn.Sequential(nn.Linear(0, 32), nn.Linear(32, 32))
    with said("the weight is empty: 0"):
        co.quantize_model(model)
    assert packed_names(model) == ["1"]


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("one_object", [True, False])
def test_parameters_of_two_modules_stay(part: str, one_object: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    tied = getattr(model[0], part)
    setattr(model[2], part, tied if one_object else nn.Parameter(tied.data))
    with said(f"the {part} is also another module's: 0, 2"):
        co.quantize_model(model)
    assert packed_names(model) == ["1"]


def test_layers_of_bitsandbytes_stay_with_the_engine() -> None:
    bnb = import_or_skip("bitsandbytes")
    model = nn.Sequential(nn.Linear(32, 32), bnb.nn.Linear4bit(32, 32), bnb.nn.Linear8bitLt(32, 32))
    with said(
        "Linear4bit is a subclass of torch.nn.Linear: 1",
        "Linear8bitLt is a subclass of torch.nn.Linear: 2",
    ):
        co.quantize_model(model)
    assert packed_names(model) == ["0"]


# ---- refusals, and the model after an error


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 3}, ValueError, "bits is 3"),
        ({"group_size": 100}, ValueError, "group_size is 100"),
        ({"symmetric": None}, TypeError, "symmetric is None; True or False"),
        (
            {"act_quant": "row"},
            ValueError,
            "act_quant is 'row'; supported are 'none', 'token' and 'block'",
        ),
        ({"clip": "mae"}, ValueError, "clip is 'mae'"),
        ({"book": "af4"}, ValueError, "book is 'af4'"),
        ({"book": "nf4", "bits": 8}, ValueError, "bits is 8; 'nf4' has 16 values"),
        ({"book": "nf4", "clip": "mse"}, ValueError, "both book and clip"),
        (
            {"book": "nf4", "act_quant": "token"},
            ValueError,
            "act_quant is 'token'; with a code book it is 'none'",
        ),
        ({"skip": "lm_head"}, TypeError, "skip is 'lm_head'; a tuple of module names"),
        ({"skip": (3,)}, TypeError, r"skip is \(3,\)"),
        ({"skip": ("",)}, TypeError, r"skip is \('',\)"),
        (
            {"skip": ("lm_head", "typo")},
            ValueError,
            "skip has 'typo'; the model has no module of that name",
        ),
        ({"skip": ("0", "3")}, ValueError, "the model has no linear layer to quantise$"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        co.quantize_model(model, **options)
    assert packed_names(model) == []


def test_models_that_are_refused() -> None:
    with pytest.raises(TypeError, match=r"model is a Tensor; a torch.nn.Module is expected"):
        co.quantize_model(torch.zeros(3))
    with pytest.raises(ValueError, match="the model is itself a Linear"):
        co.quantize_model(nn.Linear(32, 32))
    with pytest.raises(
        ValueError, match=r"no linear layer to quantise \(the weight is float64: 0\)"
    ):
        co.quantize_model(nn.Sequential(nn.Linear(32, 32).double()))
    with pytest.raises(ValueError, match=r"no linear layer to quantise$"):
        co.quantize_model(nn.Sequential(nn.Embedding(3, 3)))
    for compiled in (torch.compile(mlp()), nn.Sequential(torch.compile(mlp()))):
        with pytest.raises(ValueError, match="the model is compiled; quantise it first"):
            co.quantize_model(compiled)
    model = mlp()
    model[0].compile()
    with pytest.raises(ValueError, match="the model is compiled"):
        co.quantize_model(model)
    model = mlp()
    model[3].to("meta")
    with pytest.raises(ValueError, match="'3': the weight is on the meta device"):
        co.quantize_model(model)
    assert packed_names(model) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_weight_that_is_not_finite_is_refused_before_anything_changes(
    value: float, dtype: torch.dtype
) -> None:
    model = mlp(dtype)
    model[3].weight.data[5, 7] = value
    with pytest.raises(ValueError, match="'3': the weight has NaN or infinite values"):
        co.quantize_model(model)
    assert packed_names(model) == []


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, RuntimeError])
def test_an_error_while_quantising_leaves_a_usable_model(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    expected = model(randn(2, 96))
    monkeypatch.setattr(
        module, "reorder", lambda weight: co.reorder(weight) if weight.n == 70 else fail(error)
    )
    with pytest.raises(
        error,
        match="'3': full; 1 of 2 layers were quantised before it, the others are as they were",
    ):
        co.quantize_model(model, 8, 32)
    assert packed_names(model) == ["0"]
    assert (model(randn(2, 96)) - expected).norm() <= 0.03 * expected.norm()
    monkeypatch.undo()
    co.quantize_model(model, 8, 32)
    assert packed_names(model) == ["0", "3"]


# ---- memory, devices, progress


def test_one_float_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []

    def counted(*args: Any) -> Any:
        alive.append(sum(weight() is not None for weight in weights))
        return co.quantize(*args)

    monkeypatch.setattr(module, "quantize", counted)
    co.quantize_model(model)
    assert alive == [5, 4, 3, 2, 1]
    assert not any(weight() is not None for weight in weights)


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[tuple[str, int]] = []

    @contextmanager
    def recorded(title: str, total: int) -> Iterator[Callable[[str, int], None]]:
        steps.append((title, total))
        yield lambda name, nbytes: steps.append((name, nbytes))

    co.quantize_model(mlp())
    assert capsys.readouterr() == ("", "")  # no terminal
    monkeypatch.setattr(progress, "progress", recorded)
    co.quantize_model(mlp())
    sizes = [4 * 96 * 70, 4 * 70 * 33]
    assert steps == [("quantising", sum(sizes)), ("0", sizes[0]), ("3", sizes[1])]


def test_hooks_of_accelerate_are_kept() -> None:
    accelerate = import_or_skip("accelerate")
    model = mlp()
    expected = model(randn(2, 96))
    accelerate.dispatch_model(
        model, {"0": "cpu", "1": "cpu", "2": "cpu", "3": "cpu"}, main_device="cpu", force_hooks=True
    )
    hook = model[3]._hf_hook
    with said():
        co.quantize_model(model, 8, 32)
    assert packed_names(model) == ["0", "3"]
    assert model[3]._hf_hook is hook
    assert (model(randn(2, 96)) - expected).norm() <= 0.03 * expected.norm()


def test_offloaded_weights_are_refused() -> None:
    accelerate = import_or_skip("accelerate")
    model = accelerate.cpu_offload(mlp(), torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"'0': the weight is on the meta device \(not loaded, or offloaded\)"
    ):
        co.quantize_model(model)


@pytest.mark.gpu
def test_layers_stay_on_their_gpu_and_memory_is_bounded() -> None:
    size, count = 2048, 6
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(
        *(nn.Linear(size, size, dtype=torch.float16, device="cuda") for _ in range(count))
    )
    model.append(nn.Linear(size, 8, dtype=torch.float16))
    floats = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    co.quantize_model(model)
    assert [layer.codes.device.type for layer in model] == ["cuda"] * count + ["cpu"]
    assert torch.cuda.memory_allocated() - before < 0.4 * floats
    # fp32 temporaries of the layer at hand; never a second model
    assert torch.cuda.max_memory_allocated() - before < floats + 16 * 4 * size * size
    x = randn(3, size, dtype=torch.float16).cuda()
    assert model[:count](x).isfinite().all()


def test_public_names() -> None:
    assert files.Options is conversion_plan.Options
    assert "quantize_model" in co.__all__
    assert not {"Options", "Fused"} & set(dir(co))


CLASSES = {
    "LlamaForSequenceClassification": ("Llama", ["score"]),
    "LlamaForTokenClassification": ("Llama", ["score"]),
    "LlamaForQuestionAnswering": ("Llama", ["qa_outputs"]),
    "BertForSequenceClassification": ("Bert", ["classifier"]),
    "BertForMaskedLM": ("Bert", ["cls.predictions.decoder"]),
    "RobertaForSequenceClassification": ("Roberta", ["classifier.dense", "classifier.out_proj"]),
    "ViTForImageClassification": ("ViT", ["classifier"]),
}


@pytest.mark.parametrize("name", CLASSES)
def test_output_heads_of_any_name_stay_floats(name: str, tmp_path: Path) -> None:
    transformers = import_or_skip("transformers")
    family, heads = CLASSES[name]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = getattr(transformers, f"{family}Config")(
        **sizes, **({} if family == "ViT" else {"vocab_size": 96})
    )
    config.tie_word_embeddings = False
    model = getattr(transformers, name)(config)
    model.save_pretrained(tmp_path / "float")
    reorder_model(
        co.load_checkpoint(tmp_path / "float"), tmp_path / "packed", conversion_plan.Options(4, 32)
    )
    reordered = getattr(transformers, name).from_pretrained(tmp_path / "packed")
    every = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    with said():
        assert {*packed_names(co.quantize_model(copy.deepcopy(model), 4, 32))} == every - {*heads}
    assert {*packed_names(reordered)} == every - {*heads}
    assert {*heads} <= {*packed_names(co.quantize_model(model, 4, 32, skip=()))}
