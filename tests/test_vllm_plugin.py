"""The plugin's behaviour when vLLM calls it, with vLLM's tables in miniature."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import cutlass_ops as co
from cutlass_ops import _C
from cutlass_ops import vllm as plugin
from cutlass_ops.engines import layers
from cutlass_ops.files.packed_config import WeightFormat, quantization_config
from cutlass_ops.ops import expert_packing
from cutlass_ops.vllm import awq, experts, gated, linear


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, list[Any]]]:
    """vLLM's lists of kernels, where the plugin looks for them."""
    lists: dict[str, dict[str, list[Any]]] = {
        name: {"cuda": ["theirs"], "cpu": ["theirs"]}
        for name in ("_POSSIBLE_KERNELS", "_POSSIBLE_INT8_KERNELS")
    }

    def register_linear_kernel(kernel: Any, platform: str, kind: str) -> None:
        lists["_POSSIBLE_KERNELS" if kind == "mp" else "_POSSIBLE_INT8_KERNELS"][platform].append(
            kernel
        )

    for name, value in {
        "MISSING": None,
        "vllm_linear": SimpleNamespace(**lists),
        "register_linear_kernel": register_linear_kernel,
        "register_quantization_config": lambda name: lambda config: config,
        "PlatformEnum": SimpleNamespace(CUDA="cuda", CPU="cpu"),
        "take_experts": lambda: None,
        "take_gated_mlps": lambda: None,
        "take_checkpoints": lambda: None,
    }.items():
        monkeypatch.setattr(plugin, name, value, raising=False)
    return lists


def test_the_plugins_kernels_come_first_and_once(tables: dict[str, dict[str, list[Any]]]) -> None:
    plugin.register()
    plugin.register()
    ours = [plugin.CutlassOpsLinearKernel, plugin.CutlassOpsInt8LinearKernel]
    for kernel, platforms in zip(ours, tables.values(), strict=True):
        assert platforms == {"cuda": [kernel, "theirs"], "cpu": [kernel, "theirs"]}


@pytest.mark.parametrize("exists", [True, False])
def test_amx_is_requested_where_torch_supports_it(
    exists: bool, tables: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[None] = []
    monkeypatch.delattr(torch.cpu, "_init_amx", raising=False)
    if exists:
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda: requests.append(None), raising=False)
    plugin.register()
    assert len(requests) == exists


# ---- which layers are ours on a CPU

FOUR_BITS = ["uint4", "uint4b8"]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM on a CPU that has our kernels and neither AMX nor zentorch; ``settings``
    are the plugin's.
    """
    settings: dict[str, Any] = {}
    state = SimpleNamespace(
        settings=settings,
        is_cpu=True,
        is_zen=False,
        has_amx=False,
        instruction_sets=["avx2", "scalar"],
    )
    platform = SimpleNamespace(is_cpu=lambda: state.is_cpu, is_zen_cpu=lambda: state.is_zen)
    config = SimpleNamespace(additional_config={"cutlass_ops": settings})
    for module, name, value in (
        (linear, "current_platform", platform),
        (experts, "current_platform", platform),
        (linear, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=False)),
        (linear, "get_current_vllm_config_or_none", lambda: config),
        (torch.cpu, "_is_amx_tile_supported", lambda: state.has_amx),
        (_C, "cpu_instruction_sets", lambda: state.instruction_sets),
        (_C, "built_with_cuda", True),
    ):
        monkeypatch.setattr(module, name, value, raising=False)
    return state


def layer(weight_type: str, act_type: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    """vLLM's description of a linear layer."""
    shape = (256, 64)
    return SimpleNamespace(
        full_weight_shape=shape,
        partition_weight_shape=shape,
        weight_type=weight_type,
        act_type=act_type,
        group_size=128,
    )


@pytest.mark.parametrize("weight_type", linear._BITS)
def test_a_cpu_has_kernels_for_every_type_of_weight(cpu: SimpleNamespace, weight_type: str) -> None:
    assert linear._reason_against(layer(weight_type)) is None


@pytest.mark.parametrize("act_type", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_type", linear._BITS)
def test_layers_for_which_zentorch_quantises_x_stay_with_it(
    cpu: SimpleNamespace, weight_type: str, act_type: torch.dtype
) -> None:
    cpu.is_zen = True
    reason = linear._reason_against(layer(weight_type, act_type))
    quantises = weight_type == "uint4b8" and act_type is torch.bfloat16
    assert (reason is not None and "zentorch" in reason) if quantises else reason is None


@pytest.mark.parametrize("act_quant", ["block", "token"])
def test_four_bit_layers_are_ours_where_the_user_quantises_activations(
    cpu: SimpleNamespace, act_quant: str
) -> None:
    cpu.is_zen = cpu.has_amx = True
    cpu.settings["act_quant"] = act_quant
    assert linear._reason_against(layer("uint4b8")) is None


@pytest.mark.parametrize("act_type", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_type", linear._BITS)
def test_four_bit_layers_stay_with_vllm_where_it_uses_amx(
    cpu: SimpleNamespace, weight_type: str, act_type: torch.dtype
) -> None:
    cpu.has_amx = True
    reason = linear._reason_against(layer(weight_type, act_type))
    uses = weight_type in FOUR_BITS and act_type is torch.bfloat16
    assert (reason is not None and "AMX" in reason) if uses else reason is None


def test_no_layer_is_ours_on_a_cpu_without_fast_kernels(cpu: SimpleNamespace) -> None:
    cpu.instruction_sets = ["scalar"]
    assert (
        linear._reason_against(layer("uint4b8")) == "the package has no fast kernels for this CPU"
    )


@pytest.mark.parametrize("is_cpu", [True, False])
def test_layers_with_8_bit_activations_stay_with_vllm_on_a_cpu_alone(
    cpu: SimpleNamespace, is_cpu: bool
) -> None:
    cpu.is_cpu = is_cpu
    reason = linear._reason_against_int8(SimpleNamespace(is_static_input_scheme=False))
    assert reason == ("vLLM's kernel is faster on a CPU" if is_cpu else None)


def test_experts_stay_with_vllm_on_a_cpu(cpu: SimpleNamespace) -> None:
    assert experts._reason_of_device(128) == "experts have kernels for GPUs alone"


def test_a_setting_that_does_not_exist_is_an_error_whatever_the_layers(
    cpu: SimpleNamespace,
) -> None:
    cpu.settings["reference"] = True
    with pytest.raises(
        ValueError, match="additional_config has 'reference' for cutlass_ops; known are act_quant"
    ):
        linear._reason_against_int8(SimpleNamespace(is_static_input_scheme=True))


def test_experts_of_another_class_are_left_to_vllm_with_a_reason(
    cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(experts, "_log_left", lines.append)
    method = type("AutoAWQMoEMethod", (), {})()
    get_quant_method = experts._wrapped(lambda config, layer, prefix: method)
    assert get_quant_method(None, type("DbrxExperts", (), {})(), "layers.0") is method
    assert lines == ["the layer is a DbrxExperts"]


@pytest.mark.parametrize("n", [128, 72])  # whole row panels, and not
@pytest.mark.parametrize(
    ("method", "columns_first"),
    [
        ("CompressedTensorsWNA16MoEMethod", False),
        ("CompressedTensorsWNA16MarlinMoEMethod", True),
        ("AutoGPTQMoEMethod", True),
        ("AutoAWQMoEMethod", True),
    ],
)
def test_experts_are_packed_several_at_once_as_one_by_one(
    method: str, columns_first: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, k, groups = 5, 256, 2
    monkeypatch.setattr(expert_packing, "_CODES_AT_ONCE", 2 * n * k)
    random = torch.Generator().manual_seed(n)
    awq_order = method == "AutoAWQMoEMethod"
    has_zeros = method != "AutoGPTQMoEMethod"

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=random).int()

    scales = torch.rand(number, n, groups, generator=random) + 0.5
    if columns_first:
        codes = words(number, k, n // 8) if awq_order else words(number, k // 8, n)
        zeros, scales = words(number, groups, n // 8), scales.transpose(1, 2).contiguous()
    else:
        codes, zeros = words(number, n, k // 8), words(number, n // 8, groups)
    names = ("qweight", "scales", "qzeros")
    if method.startswith("Compressed"):
        names = ("weight_packed", "weight_scale", "weight_zero_point")
        codes.is_transposed = columns_first
    layer = SimpleNamespace(
        **{f"w13_{name}": t for name, t in zip(names, (codes, scales, zeros), strict=True)}
    )
    monkeypatch.setattr(experts, "_form", lambda method: (4, 128, has_zeros))
    stored = experts._stored(type(method, (), {})(), layer, "w13")
    each = [
        layers.stored_weight(
            codes[e], scales[e], zeros[e] if has_zeros else None, 4, 128, columns_first, awq_order
        )
        for e in range(number)
    ]
    assert [weight.shape for weight in stored] == [(n, k)] * number
    for in_eights in (False, True):
        at_once, in_turn = (co.reorder_experts(weights, in_eights) for weights in (stored, each))
        assert (at_once.shape, at_once.gated) == ((number, n, k), in_eights)
        for name, tensor in in_turn.tensors().items():
            assert torch.equal(at_once.tensors()[name], tensor), name


# ---- batch-invariant mode


@pytest.fixture
def invariant(cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """vLLM in batch-invariant mode; how the products were called."""
    for module in (awq, experts, linear):
        monkeypatch.setattr(
            module, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True), raising=False
        )
    flags: list[bool] = []
    monkeypatch.setattr(
        layers.gemm, "mixed_gemm", lambda *args, batch_invariant: flags.append(batch_invariant)
    )
    return flags


def parameter(values: torch.Tensor, **attributes: int) -> torch.nn.Parameter:
    made = torch.nn.Parameter(values, requires_grad=False)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def int4_kernel(module: torch.nn.Module) -> Any:
    """A kernel of a layer with 4-bit weights, with the layer's parameters."""
    kernel: Any = object.__new__(linear.CutlassOpsLinearKernel)
    kernel.config = SimpleNamespace(**vars(layer("uint4b8")), zero_points=False)
    kernel.w_q_name, kernel.w_s_name, kernel.w_zp_name = "codes", "scales", None
    module.codes = parameter(torch.zeros(64, 32, dtype=torch.int32), output_dim=0, packed_dim=1)
    module.scales = parameter(torch.ones(64, 2), output_dim=0)
    return kernel


def int8_kernel(module: torch.nn.Module) -> Any:
    """The same with 8-bit weights and activations."""
    kernel: Any = object.__new__(linear.CutlassOpsInt8LinearKernel)
    kernel.config = SimpleNamespace(is_channelwise=True, input_symmetric=True)
    kernel.layer_param_names = ("weight", "weight_scale")
    module.weight = parameter(torch.zeros(64, 256, dtype=torch.int8))
    module.weight_scale = parameter(torch.ones(64, 1))
    return kernel


@pytest.mark.parametrize("kernel_of", [int4_kernel, int8_kernel])
@pytest.mark.parametrize("is_set", [True, False])
def test_kernels_are_batch_invariant_where_vllm_is(
    invariant: list[bool], is_set: bool, kernel_of: Any
) -> None:
    linear.envs.VLLM_BATCH_INVARIANT = is_set
    module = torch.nn.Module()
    kernel = kernel_of(module)
    kernel.process_weights_after_loading(module)
    kernel.apply_weights(module, torch.zeros(1, 256))
    assert invariant == [is_set]


def test_layers_use_cutlass_ops_in_batch_invariant_mode(
    invariant: list[bool], cpu: SimpleNamespace
) -> None:
    assert linear._reason_against(layer("uint4b8")) is None


def awq_method() -> Any:
    """vLLM's method of AWQ's layers in batch-invariant mode."""

    def create_weights(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        module.qweight = parameter(torch.zeros(256, 8, dtype=torch.int32))
        module.qzeros = parameter(torch.zeros(2, 8, dtype=torch.int32))
        module.scales = parameter(torch.ones(2, 64, dtype=torch.bfloat16))

    method: Any = type("AutoAWQLinearMethod", (), {"create_weights": create_weights})()
    method.quant_config = SimpleNamespace(weight_bits=4, group_size=128)
    return method


def test_awq_uses_cutlass_ops_in_batch_invariant_mode(
    invariant: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    quiet = SimpleNamespace(info_once=lambda line, *arguments: lines.append(line % arguments))
    engine = replace(awq.ENGINE, logger=quiet, settings=dict, batch_invariant=lambda: True)
    monkeypatch.setattr(awq._Linear, "engine", engine)
    original = awq_method()
    method = experts._wrapped(lambda config, module, prefix: original)(None, None, "layers.0")
    assert type(method).__name__ == "AutoAWQLinearMethod"
    module = torch.nn.Module()
    method.create_weights(module, 256, [64], 256, 64, torch.bfloat16)
    method.process_weights_after_loading(module)
    method.apply(module, torch.zeros(1, 256))
    assert invariant == [True]
    assert lines == ["Using cutlass_ops for AutoAWQLinearMethod"]


def test_awq_without_marlin_stays_with_vllm_outside_batch_invariant_mode(
    invariant: list[bool],
) -> None:
    awq.envs.VLLM_BATCH_INVARIANT = False
    original = awq_method()
    assert (
        experts._wrapped(lambda config, module, prefix: original)(None, None, "layers.0")
        is original
    )


@pytest.fixture
def packed_directory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that loads packed directories, with vLLM's classes in miniature; and
    a configuration.
    """
    from cutlass_ops.vllm import directory

    class Layer(torch.nn.Module):
        num_embeddings_per_partition, params_dtype = 64, torch.bfloat16

    kinds: dict[str, Any] = {
        name: type(name, (Layer,), {})
        for name in ("RoutedExperts", "LinearBase", "VocabParallelEmbedding")
    }
    kinds["ParallelLMHead"] = type("ParallelLMHead", (kinds["VocabParallelEmbedding"],), {})
    kinds["UnquantizedEmbeddingMethod"] = kinds["UnquantizedLinearMethod"] = type(
        "Unquantized", (), {}
    )
    for name, kind in kinds.items():
        monkeypatch.setattr(directory, name, kind, raising=False)
    monkeypatch.setattr(
        directory, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True), raising=False
    )
    monkeypatch.setattr(directory.CutlassOpsConfig, "packed_modules_mapping", {}, raising=False)
    return directory


def quantization(**embeddings: str) -> dict[str, Any]:
    weights = {
        name: WeightFormat(8, 32, (("scales", torch.float16),)) for name in ("lm_head", *embeddings)
    }
    return quantization_config(weights, embeddings=embeddings)


@pytest.mark.parametrize("prefix", ["embed", ""])
def test_the_only_packed_embedding_needs_no_name(prefix: str, packed_directory: Any) -> None:
    config = packed_directory.CutlassOpsConfig(quantization(embed="embed"))
    method = config.get_quant_method(packed_directory.VocabParallelEmbedding(), prefix)
    assert type(method) is packed_directory.PackedEmbeddingMethod
    assert method.prefix == "embed"


def test_ambiguous_embeddings_are_refused(packed_directory: Any) -> None:
    config = packed_directory.CutlassOpsConfig(quantization(one="one", two="two"))
    with pytest.raises(ValueError, match="which of the packed embeddings one, two it makes"):
        config.get_quant_method(packed_directory.VocabParallelEmbedding(), "")


def test_ranks_share_the_heads_of_keys_and_values(packed_directory: Any) -> None:
    place = packed_directory.ENGINE.kv_place
    assert place(SimpleNamespace(num_kv_head_replicas=2), 3, 4) == (1, 2)
    assert place(SimpleNamespace(), 3, 4) == (3, 4)


def test_an_embedding_that_is_not_packed_is_vllms(packed_directory: Any) -> None:
    for fields, prefix in ((quantization(), ""), (quantization(embed="embed"), "other")):
        method = packed_directory.CutlassOpsConfig(fields).get_quant_method(
            packed_directory.VocabParallelEmbedding(), prefix
        )
        assert type(method) is packed_directory.UnquantizedEmbeddingMethod


@pytest.mark.parametrize("rows", [64, 128])
def test_a_tied_embedding_gets_the_heads_weight(
    rows: int, packed_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = packed_directory.CutlassOpsConfig(quantization(embed="lm_head"))
    embedding, head = packed_directory.VocabParallelEmbedding(), packed_directory.ParallelLMHead()
    looks_up, multiplies = (
        config.get_quant_method(embedding, ""),
        config.get_quant_method(head, "lm_head"),
    )
    looks_up.create_weights(embedding)
    with pytest.raises(
        ValueError, match="embed is tied to the output head, which another rank of the pipeline has"
    ):
        looks_up.embedding(embedding, torch.tensor([0]))
    packed = co.reorder(co.quantize(torch.randn(rows, 32), 8, 32))
    multiplies.shards = SimpleNamespace(
        part=SimpleNamespace(sizes=[rows]), loaded=set(), weights=lambda tensors: [packed]
    )
    multiplies.parts = list(packed.tensors())
    for part, tensor in packed.tensors().items():
        head.register_buffer(part, tensor)
    quiet = SimpleNamespace(info_once=lambda text: None)
    engine = replace(
        packed_directory.ENGINE, settings=dict, logger=quiet, random_weights=lambda: True
    )
    monkeypatch.setattr(packed_directory.PackedLinearMethod, "engine", engine)
    if rows != 64:
        with pytest.raises(
            ValueError, match="lm_head has 128 rows on this rank; the embedding tied to it has 64"
        ):
            multiplies.process_weights_after_loading(head)
        return
    multiplies.process_weights_after_loading(head)
    assert multiplies.batch_invariant is True
    ids = torch.tensor([[3, 63]])
    assert torch.equal(
        looks_up.embedding(embedding, ids), co.dequantize(packed, torch.bfloat16)[ids]
    )


# ---- MLPs whose products apply the activation


class Merged(torch.nn.Module):
    """vLLM's layer of gate and up, in miniature: its parameters are what a checkpoint has."""

    def __init__(self, sizes: tuple[int, ...] = (24, 24), biased: bool = False) -> None:
        super().__init__()
        self.output_partition_sizes = list(sizes)
        n = sum(sizes)
        self.bias = torch.nn.Parameter(torch.ones(n)) if biased else None
        self.second: float | None = None
        random = torch.Generator().manual_seed(n)
        self.codes = parameter(torch.randint(16, (n, 64), generator=random, dtype=torch.uint8))

    def weight(self) -> co.QuantizedWeight:
        scales = torch.full((len(self.codes), 2), 0.01)
        return co.QuantizedWeight(self.codes.data, scales, group_size=32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float | None]:
        return layers.product(self, x, self.bias, False), self.second


class SiluAndMul(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


class GeluAndMul(torch.nn.Module):
    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.gelu(gate, approximate=self.approximate) * up


class MLP(torch.nn.Module):
    def __init__(self, merged: Any = None, function: Any = None) -> None:
        super().__init__()
        self.gate_up_proj = merged or Merged()
        self.act_fn = function or SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gate_up_proj(x)
        return self.act_fn(y)


class UsedTwice(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gate_up_proj(x)
        return self.act_fn(y) + y.sum()


class Clamped(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gate_up_proj(x)
        return self.act_fn(y.clamp(max=1))


class UsesBoth(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj.second = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, second = self.gate_up_proj(x)
        return self.act_fn(y) + second


class WithBias(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.gate_up_proj(x)
        return self.act_fn(y) if bias is None else bias


class ActsTwice(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gate_up_proj(x)
        return self.act_fn(y) + self.act_fn(x[:, :48])


class Otherwise(SiluAndMul):
    pass


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's loader, which has layers of ``Merged`` pack their weights; ``config`` is vLLM's."""
    package = "vllm.model_executor"
    found = SimpleNamespace(
        config=SimpleNamespace(lora_config=None), is_cuda=True, capability=(9, 0)
    )

    def process_weights_after_loading(model: torch.nn.Module, *_: Any) -> None:
        for module in model.modules():
            if isinstance(module, Merged):
                layers.keep(module, ["codes"], module.weight(), "none", True)

    found.process_weights_after_loading = process_weights_after_loading
    modules = {
        f"{package}.layers.activation": {"SiluAndMul": SiluAndMul, "GeluAndMul": GeluAndMul},
        f"{package}.layers.linear": {"MergedColumnParallelLinear": Merged},
        f"{package}.model_loader": {"base_loader": found},
    }
    for name in ("vllm", package, f"{package}.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name, value in {
        "get_current_vllm_config_or_none": lambda: found.config,
        "current_platform": SimpleNamespace(is_cuda=lambda: found.is_cuda),
        "logger": SimpleNamespace(info_once=lambda *_: None),
    }.items():
        monkeypatch.setattr(gated, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found.capability)
    gated.take_gated_mlps()
    gated.take_gated_mlps()  # as vLLM's processes do
    return found


def outputs_of(loader: SimpleNamespace, mlp: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """An MLP's outputs before and after vLLM loaded it."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    plain = copy.deepcopy(mlp)
    for module in plain.modules():
        if isinstance(module, Merged):
            layers.keep(module, ["codes"], module.weight(), "none", True)
    loader.process_weights_after_loading(mlp, None, None)
    return plain(x), mlp(x)


@pytest.mark.parametrize("function", [SiluAndMul(), GeluAndMul("none"), GeluAndMul("tanh")])
def test_products_apply_the_activation_that_follows(loader: SimpleNamespace, function: Any) -> None:
    mlp = MLP(function=function)
    expected, y = outputs_of(loader, mlp)
    assert type(mlp.act_fn) is torch.nn.Identity
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: UsedTwice(),
        lambda: Clamped(),
        lambda: UsesBoth(),
        lambda: WithBias(),
        lambda: ActsTwice(),
        lambda: MLP(function=Otherwise()),
        lambda: MLP(Merged(biased=True)),
        lambda: MLP(Merged((20, 20))),
        lambda: MLP(Merged((16, 8, 24))),
        lambda: MLP(Merged((16, 32))),
    ],
)
def test_other_mlps_stay_as_they_are(loader: SimpleNamespace, make: Any) -> None:
    mlp = make()
    expected, y = outputs_of(loader, mlp)
    assert type(mlp.act_fn) is not torch.nn.Identity
    assert torch.equal(y, expected)


def test_layers_of_two_mlps_and_layers_with_hooks_stay_as_they_are(
    loader: SimpleNamespace,
) -> None:
    both = torch.nn.Sequential(MLP(), torch.nn.Linear(24, 64), MLP())
    both[2].gate_up_proj = both[0].gate_up_proj
    expected, y = outputs_of(loader, both)
    assert torch.equal(y, expected)
    hooked = MLP()
    hooked.act_fn.register_forward_hook(lambda module, inputs, output: 2 * output)
    expected, y = outputs_of(loader, hooked)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("reason", ["adapters", "a CPU", "an A100", "a layer of vLLM's"])
def test_activations_stay_vllms(
    loader: SimpleNamespace, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "adapters":
        loader.config.lora_config = object()
    loader.is_cuda = reason != "a CPU"
    loader.capability = (8, 0) if reason == "an A100" else (9, 0)
    mlp = MLP()
    if reason == "a layer of vLLM's":  # our kernels did not take it
        monkeypatch.setattr(layers, "keep", lambda *_: None)
        loader.process_weights_after_loading(mlp, None, None)
    else:
        expected, y = outputs_of(loader, mlp)
        assert torch.equal(y, expected)
    assert type(mlp.act_fn) is SiluAndMul
