"""Pointers, sizes and the stream as integers; 0 is a null pointer. The callers check what they
pass.
"""

from collections.abc import Sequence
from typing import Any

built_with_cuda: bool
cuda_architectures: str
cutlass_version: str
max_awq_rows: int
cpu_fused_rows: int
cpu_panel_rows: int
cpu_panel_rows_of_bfloat16: int
layout_name: str  # of the packed order, in files
layout_version: int  # of files without gated weights
gated_experts_layout_version: int
gated_layout_version: int
max_m: int  # rows of x
max_norm_k: int  # columns of a norm
padded_rows: int  # quantised rows up to which they have memory for whole tiles
least_norm_eps: float

class DataType:
    none: DataType
    float32: DataType
    float16: DataType
    bfloat16: DataType

class ActQuant:
    none: ActQuant
    token: ActQuant
    block: ActQuant
    tensor: ActQuant

class Activation:
    none: Activation
    relu: Activation
    relu6: Activation
    gelu: Activation
    silu: Activation
    clamp: Activation
    clamped_swiglu: Activation
    gelu_tanh: Activation

class Format:
    int4: Format
    int8: Format
    codebook: Format
    e4m3: Format
    int2: Format

class PackedWeight:
    def __init__(
        self,
        codes_ptr: int,
        scales_ptr: int,
        zeros_ptr: int,
        offsets_ptr: int,
        perm_ptr: int,
        codebook_ptr: int,
        n: int,
        k: int,
        format: Format,
        group_size: int,
        scale_type: DataType,
        offset_type: DataType,
        gated: bool,
        bias_ptr: int,
        bias_type: DataType,
        device: object,
        gpu: int,
        parts: object,
    ) -> None: ...
    def is_current(self) -> bool: ...
    def set_sums(self, colsums_ptr: int) -> None: ...

class QuantizedActivations:
    def __init__(
        self, codes_ptr: int, scales_ptr: int, zeros_ptr: int, block: int, stride: int, rows: int
    ) -> None: ...

class Epilogue:
    def __init__(
        self,
        bias_ptr: int,
        bias_type: DataType,
        residual_ptr: int,
        residual_type: DataType,
        residual_stride: int,
        activation: Activation,
        low: float,
        high: float,
        saturate: bool,
    ) -> None: ...

class Device:
    def __init__(
        self,
        architecture: int,
        multiprocessors: int,
        shared_memory: int,
        memory_bandwidth: int = 0,
    ) -> None: ...
    @property
    def architecture(self) -> int: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def shared_memory(self) -> int: ...
    @property
    def memory_bandwidth(self) -> int: ...

class Plan:
    @property
    def kernel(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def block_n(self) -> int: ...
    @property
    def block_m(self) -> int: ...
    @property
    def grid(self) -> tuple[int, int]: ...
    @property
    def cluster_size(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def slices(self) -> int: ...
    @property
    def tail_tiles(self) -> int: ...
    @property
    def rounds(self) -> bool: ...
    @property
    def quantizes(self) -> bool: ...
    @property
    def compensates(self) -> bool: ...
    @property
    def launches(self) -> list[str]: ...
    @property
    def workspace(self) -> int: ...

def packed_bytes(n: int, k: int, bits: int) -> int: ...
def colsum_bytes(weight: PackedWeight) -> int: ...

class RouteProblem:
    def __init__(
        self,
        ids_ptr: int,
        wide: bool,
        tokens: int,
        top: int,
        experts: int,
        map_ptr: int,
        map_size: int,
    ) -> None: ...

def route(
    problem: RouteProblem, offsets_ptr: int, order_ptr: int, device_index: int, stream: int
) -> None: ...

class MoePlan:
    kernel: str
    slots: int
    gate_up: Plan
    down: Plan
    workspace: int

class MoeProblem:
    def __init__(
        self,
        route: RouteProblem,
        x_ptr: int,
        x_type: DataType,
        x_stride: int,
        gate_up: PackedWeight,
        gate_up_perm_ptr: int,
        down: PackedWeight,
        down_perm_ptr: int,
        hidden: int,
        act_quant: ActQuant,
        symmetric: bool,
        activation: Activation,
        low: float,
        high: float,
        weights_ptr: int,
        weight_type: DataType,
        out_ptr: int,
        architecture: int,
    ) -> None: ...
    def plan(self, device: Device) -> MoePlan: ...

def mixed_moe(
    problem: MoeProblem, plan: MoePlan, workspace_ptr: int, device_index: int, stream: int
) -> None: ...
def experts_take(weight: PackedWeight) -> bool: ...

most_experts: int
most_positions: int

def weight_colsum(weight: PackedWeight, colsums_ptr: int, stream: int) -> None: ...
def pack(codes_ptr: int, out_ptr: int, n: int, k: int, bits: int) -> None: ...
def unpack(packed_ptr: int, out_ptr: int, n: int, k: int, bits: int) -> None: ...
def pack_cuda(
    codes_ptr: int,
    n_stride: int,
    k_stride: int,
    packed_ptr: int,
    n: int,
    k: int,
    bits: int,
    device_index: int,
    stream: int,
) -> None: ...
def unpack_cuda(
    codes_ptr: int,
    n_stride: int,
    k_stride: int,
    packed_ptr: int,
    n: int,
    k: int,
    bits: int,
    device_index: int,
    stream: int,
) -> None: ...
def unpack_along_k(
    words_ptr: int, n_stride: int, k_stride: int, out_ptr: int, n: int, k: int, bits: int
) -> None: ...
def unpack_along_n(
    words_ptr: int, n_stride: int, k_stride: int, order: Sequence[int], out_ptr: int, n: int, k: int
) -> None: ...
def unpack_tiles(words_ptr: int, out_ptr: int, n: int, k: int) -> None: ...
def unpack_bytes(
    bytes_ptr: int,
    blocks: int,
    stride: int,
    size: int,
    run: int,
    in_turn: bool,
    high_first: bool,
    out_ptr: int,
) -> None: ...
def permute_columns(codes_ptr: int, out_ptr: int, n: int, k: int, perm_ptr: int) -> None: ...
def mixed_gemm(
    weight: PackedWeight,
    x: object,  # a tensor [m, k], or the codes of `quantized`
    quantized: object,  # QuantizedActivations or None
    m: int,
    x_type: DataType,
    act_quant: ActQuant,
    symmetric: bool,
    epilogue: object,  # Epilogue or None
    shape: tuple[int, ...],  # of the result
    dtype: object,  # the torch.dtype that out_type is
    out_type: DataType,
    batch_invariant: bool,
    architecture: int,
    exact: bool,
    device_index: int,
    stream: int,
) -> Any: ...  # a tensor

# a tensor, or None
def product(weight: object, x: object, act_quant: str, symmetric: bool, buffers: object) -> Any: ...
def quantize_activations(
    x_ptr: int,
    type: DataType,
    x_stride: int,
    m: int,
    k: int,
    perm_ptr: int,
    codes_ptr: int,
    scales_ptr: int,
    zeros_ptr: int,
    block: int,
    stride: int,
    device_index: int,
    stream: int,
    up_ptr: int = 0,
    up_stride: int = 0,
    norm_weight_ptr: int = 0,
    norm_eps: float = 0.0,
    residual_ptr: int = 0,
    residual_stride: int = 0,
    sum_ptr: int = 0,
) -> None: ...
def cpu_instruction_sets() -> list[str]: ...
def use_cpu_instruction_set(name: str) -> None: ...
def cpu_kernel() -> str: ...
def cpu_quantize_activations(
    x_ptr: int,
    type: DataType,
    x_stride: int,
    m: int,
    k: int,
    perm_ptr: int,
    out: QuantizedActivations,
    threads: int,
) -> None: ...
def cpu_multiplies_bfloat16() -> bool: ...
def cpu_fuses(m: int, exact: bool) -> bool: ...
def cpu_uses_bfloat16(weight: PackedWeight, m: int, x_type: DataType, exact: bool) -> bool: ...
def cpu_rounds_weight(weight: PackedWeight, m: int, x_type: DataType, exact: bool) -> bool: ...
def cpu_dequantize(
    weight: PackedWeight, out_ptr: int, type: DataType, first_row: int, rows: int, threads: int
) -> None: ...
def cpu_mixed_gemm(
    weight: PackedWeight,
    m: int,
    x_type: DataType,
    x_ptr: int,
    x_stride: int,
    act_quant: ActQuant,
    symmetric: bool,
    quantized: object,  # QuantizedActivations or None
    bias_ptr: int,
    bias_type: DataType,
    out_ptr: int,
    out_type: DataType,
    exact: bool,
    threads: int,
) -> None: ...
def cpu_grouped_gemm(
    weight: PackedWeight,
    n: int,
    groups: Sequence[Sequence[int]],
    x_type: DataType,
    x_ptr: int,
    x_stride: int,
    act_quant: ActQuant,
    symmetric: bool,
    perms_ptr: int,
    bias_ptr: int,
    bias_type: DataType,
    out_ptr: int,
    out_type: DataType,
    exact: bool,
    threads: int,
) -> None: ...
def dequantize(
    weight: PackedWeight,
    out_ptr: int,
    type: DataType,
    stream: int,
    first_row: int = 0,
    rows: int = -1,
    tap_channels: int = 0,
) -> None: ...
def quantize_flat(
    x_ptr: int,
    type: DataType,
    count: int,
    blocksize: int,
    cuts_ptr: int,
    codes_ptr: int,
    magnitudes: bool,
    packed_ptr: int,
    absmax_ptr: int,
    stream: int,
) -> None: ...
def dequantize_flat(
    packed_ptr: int,
    absmax_ptr: int,
    nested_codes_ptr: int,
    nested_book_ptr: int,
    nested_offset_ptr: int,
    count: int,
    blocksize: int,
    book_ptr: int,
    out_ptr: int,
    type: DataType,
    stream: int,
) -> None: ...

class AwqWeight:
    def __init__(
        self,
        codes_ptr: int,
        scales_ptr: int,
        zeros_ptr: int,
        n: int,
        k: int,
        groups: int,
        type: DataType,
    ) -> None: ...

def dequantize_awq(weight: AwqWeight, out_ptr: int, stream: int) -> None: ...
def awq_gemm(
    weight: AwqWeight, x_ptr: int, x_stride: int, m: int, out_ptr: int, stream: int
) -> None: ...
def current_device() -> Device: ...
def plan(
    weight: PackedWeight,
    m: int,
    out_type: DataType,
    x_ptr: int,
    x_type: DataType,
    x_stride: int,
    quantized: object,  # QuantizedActivations or None
    act_quant: ActQuant,
    symmetric: bool,
    batch_invariant: bool,
    architecture: int,
    exact: bool,
    device: Device,
    residual: bool = False,
) -> Plan: ...
def rows_of(shape: object, strides: object, k: int) -> tuple[int, int]: ...

class ImageProblem:
    def __init__(
        self,
        weight: PackedWeight,
        x_ptr: int,
        x_type: DataType,
        x_stride: int,
        batch: int,
        channels: int,
        size: Sequence[int],
        taps: Sequence[int],
        out_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        act_quant: ActQuant,
        symmetric: bool,
        epilogue: object,  # Epilogue or None
        out_ptr: int,
        out_type: DataType,
    ) -> None: ...
    def plan(self, device: Device) -> Plan | None: ...

def mixed_conv(
    problem: ImageProblem,
    plan: Plan,
    x_ptr: int,
    bias_ptr: int,
    out_ptr: int,
    workspace_ptr: int,
    stream: int,
) -> None: ...

tap_vector: int  # output channels

def depthwise_conv(problem: ImageProblem, taps_ptr: int, stream: int) -> None: ...
def finish_sums(problem: ImageProblem, sums_ptr: int, stream: int) -> None: ...
def quantized_values(
    x_ptr: int,
    out_ptr: int,
    x_type: DataType,
    out_type: DataType,
    rows: int,
    columns: int,
    block: int,
    symmetric: bool,
    range_ptr: int,
    stream: int,
) -> None: ...

class ConvOrder:
    by_channels: ConvOrder
    by_taps: ConvOrder
    flat: ConvOrder

class ConvOutput:
    int8: ConvOutput
    uint8: ConvOutput
    int32: ConvOutput
    float16: ConvOutput
    bfloat16: ConvOutput

class ConvWeight:
    def __init__(
        self,
        codes_ptr: int,
        order: ConvOrder,
        sums_ptr: int,
        scales_ptr: int,
        scale_type: DataType,
        n: int,
        taps: Sequence[int],
        channels: int,
    ) -> None: ...

class ConvPlan:
    kernel: str
    block_m: int
    block_n: int
    cluster_size: int
    slices: int
    turns: bool
    windows: bool
    overlaps: bool
    ctas_per_sm: int
    stages: int
    grid: int
    copied_channels: int
    workspace: int
    predicted_clocks: int

class ConvProblem:
    def __init__(
        self,
        weight: ConvWeight,
        x_ptr: int,
        x_unsigned: bool,
        x_type: DataType,
        x_symmetric: bool,
        shape: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        bias_ptr: int,
        bias_int32: bool,
        bias_type: DataType,
        out_ptr: int,
        out_type: ConvOutput,
        x_scale: float,
        x_zero_point: int,
        y_scale: float,
        y_zero_point: int,
        activation: Activation,
        low: float,
        high: float,
    ) -> None: ...
    def plan(self, device: Device) -> ConvPlan: ...
    def plans(self, device: Device) -> list[ConvPlan]: ...
    def supported_plans(self, device: Device) -> list[ConvPlan]: ...

def conv_int8(
    problem: ConvProblem,
    plan: ConvPlan,
    x_ptr: int,
    bias_ptr: int,
    out_ptr: int,
    workspace_ptr: int,
    stream: int,
) -> None: ...
def conv_order(n: int, channels: int, taps: int, groups: int) -> ConvOrder: ...
def stored_channels(channels: int) -> int: ...
