"""Products of gated weights on a GPU, against their factors in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import (
    ACTIVATION_KINDS,
    BFLOAT,
    FLOAT,
    GPU,
    HALF,
    INF,
    NAN,
    TYPE_NAMES,
    Format,
    block_of,
    make_exact_floats,
    make_floats,
    make_weight,
    multiply,
    oracle,
    same_bits,
)
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.weights.weight import rows_of

pytestmark = pytest.mark.gpu

FORMATS = [
    Format(4),
    Format(4, "zeros", 128),
    Format(4, "zeros", 32),
    Format(4, "offsets", 64),
    Format(4, "symmetric", 16),
    Format(8),
    Format(8, "zeros", -1),
    Format(8, "offsets", 128, FLOAT),
    Format(2),
    Format(2, "zeros", 32),
]


def pack(whole: co.QuantizedWeight) -> co.PackedWeight:
    n = whole.n // 2
    return co.reorder([rows_of(whole, slice(n)), rows_of(whole, slice(n, None))], gated=True)


def gated(sums: Tensor, bias: Tensor, activation: Any, residual: Tensor, dtype: Any) -> Tensor:
    """Outputs of exact sums, each operation rounded to fp32."""
    gate, up = (sums.float() + bias.float()).chunk(2, -1)
    return (reference.activate(gate, activation) * up + residual.float()).to(dtype)


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_products_are_exact(fmt: Format, activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    kernels = set()
    for n, k, perm in ((8, 100, False), (104, 712, True), (1000, 2100, False)):
        whole = make_weight(fmt, 2 * n, k, exact=True, perm=perm)
        packed = pack(whole)
        for i, m in enumerate((1, 5, 16, 40, 130, 300)):
            dtype = (HALF, BFLOAT)[i % 2]
            block = block_of(act_quant, fmt.group_size)
            x = make_exact_floats(m, k, dtype, act_quant, symmetric, block)
            if perm and whole.perm is not None:  # blocks are of columns in the weight's order
                x = torch.empty_like(x).index_copy_(1, whole.perm, x)
            bias = torch.arange(2 * n, device=GPU, dtype=FLOAT) % 7 - 3
            residual = torch.arange(m * n, device=GPU, dtype=FLOAT).view(m, n) % 5 - 2
            # 8-bit codes plus offsets have more bits than a weight that is rounded to 16.
            options: dict[str, Any] = {"exact": fmt.bits == 8 and fmt.kind == "offsets"}
            options |= {"act_quant": act_quant, "act_symmetric": symmetric}
            for out_dtype in (FLOAT, dtype):
                options |= {"bias": bias, "activation": "relu", "out_dtype": out_dtype}
                y = multiply(x, packed, residual=residual, **options)
                sums = oracle(x, whole, act_quant, symmetric)
                assert torch.equal(y, gated(sums, bias, "relu", residual, out_dtype))
                found = co.explain(x, packed, residual=residual, **options)
                assert found.launches[-1] == "gate_sums" or found.kernel == found.launches[-1]
                kernels.add((found.kernel, found.slices > 1))
    assert len(kernels) > 1


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_few_rows_are_gated_by_the_kernels_that_multiply_them(
    fmt: Format, activations: str
) -> None:
    """Clusters of one to eight CTAs, whole and half row panels."""
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    kernels = set()
    for n, k in ((8, 100), (40, 11008), (104, 712), (1000, 2100), (8200, 1024)):
        whole = make_weight(fmt, 2 * n, k, exact=True)
        packed = pack(whole)
        bias = torch.arange(2 * n, device=GPU, dtype=FLOAT) % 7 - 3
        for i, m in enumerate((1, 4, 7, 16, 27, 50)):
            dtype = (HALF, BFLOAT)[i % 2]
            block = block_of(act_quant, fmt.group_size)
            x = make_exact_floats(m, k, dtype, act_quant, symmetric, block)
            # 8-bit codes plus offsets have more bits than a weight that is rounded to 16.
            options: dict[str, Any] = {"exact": fmt.bits == 8 and fmt.kind == "offsets"}
            options |= {"act_quant": act_quant, "act_symmetric": symmetric}
            options |= {"activation": "relu", "saturate": i == 1}
            y = multiply(x, packed, bias=bias if i else None, **options)
            sums = oracle(x, whole, act_quant, symmetric)
            zero = torch.zeros((), device=GPU)
            expected = gated(sums, bias if i else zero, "relu", zero, dtype)
            if i == 1:
                expected = expected.clamp(*(torch.finfo(dtype).max * s for s in (-1, 1)))
            assert torch.equal(y, expected)
            found = co.explain(x, packed, **options)
            if "decode" in found.kernel:
                assert found.launches[-1] == found.kernel
                kernels.add(found.kernel)
    assert kernels


@pytest.mark.parametrize("book", ["nf4", "mxfp4", "e4m3"])
@pytest.mark.parametrize("m", [1, 7, 16, 30])
def test_few_rows_of_code_books(book: str, m: int) -> None:
    """As with a residual, where gate_sums makes the outputs."""
    whole = co.quantize(
        make_floats(2048, 1024, FLOAT), 8 if book == "e4m3" else 4, 32 if book == "mxfp4" else 64,
        book=book,
    )  # fmt: skip
    packed, x, zeros = pack(whole), make_floats(m, 1024, BFLOAT), make_floats(m, 1024, BFLOAT) * 0
    assert co.explain(x, packed, residual=zeros).launches[-1] == "gate_sums"
    y = multiply(x, packed, activation="silu")
    assert torch.equal(y, multiply(x, packed, activation="silu", residual=zeros))


@pytest.mark.parametrize(
    "activation", [None, *reference.ACTIVATIONS, ("clamp", -1.0, 2.0)], ids=str
)
@pytest.mark.parametrize("m", [1, 16, 100, 600])
def test_activations(activation: Any, m: int) -> None:
    whole = make_weight(Format(4), 512, 256, exact=True, bias=True)
    x = make_exact_floats(m, 256, HALF, "none", True, 128)
    y = multiply(x, pack(whole), activation=activation, out_dtype=FLOAT)
    assert whole.bias is not None
    # In fp64, as torch's fp32 GELU has no digits left where x is below -5.
    gate, up = (oracle(x, whole).double() + whole.bias.double()).chunk(2, -1)
    expected = reference.activate(gate, activation) * up
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=TYPE_NAMES.__getitem__)
@pytest.mark.parametrize("m", [3, 200])
def test_the_factors_are_not_rounded(dtype: torch.dtype, m: int) -> None:
    whole = make_weight(Format(4), 256, 2048, exact=True)
    x = make_exact_floats(m, 2048, dtype, "none", True, 128)
    gate, up = oracle(x, whole).float().chunk(2, -1)
    assert torch.equal(multiply(x, pack(whole)), (gate * up).to(dtype))
    assert not torch.equal(gate.to(dtype) * up.to(dtype), (gate * up).to(dtype)), (
        "nothing is tested"
    )


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_any_scales(activations: str) -> None:
    """As the composition of the plain product, whose fp32 sums these are."""
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
    whole = make_weight(Format(4, "zeros"), 1024, 1024, exact=False)
    packed, plain = pack(whole), co.reorder(whole)
    for m in (2, 60, 500):
        x = make_floats(m, 1024, HALF)
        y = multiply(x, packed, activation="silu", out_dtype=FLOAT, **options)
        gate, up = co.mixed_gemm(x, plain, out_dtype=FLOAT, **options).chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("architecture", [0, 80])
def test_overflow_and_what_is_not_finite(architecture: int) -> None:
    packed = pack(make_weight(Format(8), 128, 256, exact=True))
    x = make_exact_floats(40, 256, HALF, "none", True, 128)
    x[3, 5], x[7, 9] = NAN, INF
    options: dict[str, Any] = {"activation": "relu", "architecture": architecture}
    y = multiply(x, packed, **options)
    wrong = y.isnan().all(1)
    assert wrong.nonzero().flatten().tolist() == [3, 7]
    assert not bool(y[~wrong].isnan().any())
    assert bool((y == INF).any())
    limited = multiply(x, packed, saturate=True, **options)
    assert bool((limited[~wrong].abs() <= 65504).all())
    assert torch.equal(limited == 65504, y == INF)


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_a_row_has_the_same_bits_in_every_batch(activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = pack(make_weight(Format(4), 1024, 1024, exact=False))
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
    options |= {"activation": "silu", "batch_invariant": True}
    x = make_floats(300, 1024, HALF)
    y = multiply(x, packed, **options)
    assert same_bits(multiply(x, packed, **options), y)
    for m in (1, 17, 130):
        assert same_bits(multiply(x[:m], packed, **options), y[:m])


def test_an_fp32_x_is_multiplied_in_panels() -> None:
    whole = make_weight(Format(4, "zeros"), 256, 200, exact=True)
    x = make_exact_floats(9, 200, FLOAT, "none", True, 128)
    gate, up = oracle(x, whole).float().chunk(2, -1)
    assert torch.equal(co.mixed_gemm(x, pack(whole), activation="relu"), gate.relu() * up)


@pytest.mark.parametrize("m", [1, 40, 300])
def test_cuda_graphs_replay_it(m: int) -> None:
    packed = pack(make_weight(Format(4), 1024, 1024, exact=False, bias=True))
    x = make_floats(m, 1024, HALF)

    def run() -> Tensor:
        return co.mixed_gemm(x, packed, activation="silu", act_quant="block")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    x.copy_(make_floats(m + 1, 1024, HALF)[:m])
    graph.replay()
    assert same_bits(y, run())


def test_layers_compile_and_have_gradients() -> None:
    whole = make_weight(Format(4), 512, 256, exact=False, bias=True)
    layer = co.nn.MixedLinear(pack(whole), activation="silu")
    compiled = torch.compile(layer, fullgraph=True)
    x = make_floats(20, 256, HALF).requires_grad_()
    y = layer(x)
    assert same_bits(compiled(x), y)
    grad = make_floats(20, 257, HALF)[:, :256]
    (found,) = torch.autograd.grad(y, x, grad)
    values = co.dequantize(pack(whole), FLOAT)
    assert whole.bias is not None
    exact = x.detach().float().requires_grad_()
    gate, up = torch.nn.functional.linear(exact, values, whole.bias.float()).chunk(2, -1)
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, exact, grad.float())
    torch.testing.assert_close(
        found.float(), expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max())
    )


def test_packing_on_the_gpu_is_packing_on_the_host() -> None:
    whole = make_weight(Format(4, "zeros", 32), 48, 100, exact=False, bias=True, perm=True)
    packed = pack(whole)
    for part, tensor in pack(whole.to("cpu")).tensors().items():
        assert torch.equal(packed.tensors()[part].cpu(), tensor)
    for part in ("codes", "scales", "zeros", "bias"):
        assert torch.equal(getattr(packed.unpack(), part), getattr(whole, part))
