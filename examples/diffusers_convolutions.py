"""Quantise the convolutions and linear layers of a UNet block and a VAE decoder of diffusers: error
and time of each format.

Weights and inputs are random: a trained model has other errors. On a GPU the sizes are those of
Stable Diffusion 1.5 at 512 x 512 pixels, in fp16. On a CPU they are small, and x is fp32.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.unets.unet_2d_blocks import CrossAttnDownBlock2D
from torch import Tensor, nn

import cutlass_ops as co

on_gpu = torch.cuda.is_available()
device, dtype = ("cuda", torch.float16) if on_gpu else ("cpu", torch.float32)
torch.backends.cudnn.allow_tf32 = False  # in what the results are compared with


def milliseconds(call: Callable[[], Tensor]) -> float:
    """The median time of a call, after a first one."""
    times = []
    for _ in range(21 if on_gpu else 4):
        start = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


@torch.no_grad()
def compare(name: str, model: nn.Module, run: Callable[[nn.Module], Tensor]) -> None:
    """Print what each format of a model loses, how long it takes, and its bytes."""
    exact = run(model.eval().to(device))  # fp32
    models = {str(dtype).removeprefix("torch."): model.to(dtype)}
    for form, bits, act_quant in (("W8A8", 8, "block"), ("W4A16", 4, "none")):
        models[form] = co.quantize_model(
            copy.deepcopy(model), bits, group_size=128, act_quant=act_quant, convs=True
        )
    layers = list(models["W8A8"].modules())
    convolutions, linears = (
        sum(isinstance(layer, kind) for layer in layers)
        for kind in (co.nn.MixedConv, co.MixedLinear)
    )
    print(f"{name}: {convolutions} convolutions and {linears} linear layers are packed")
    for form, one in models.items():
        error = (run(one).float() - exact).norm() / exact.norm()
        took = milliseconds(lambda one=one: run(one))
        size = sum(tensor.nbytes for tensor in (*one.parameters(), *one.buffers()))
        print(
            f"  {form:8}  error {100 * float(error):6.3f} %   {took:8.2f} ms   {size / 1e6:7.2f} MB"
        )


def like(model: nn.Module, *tensors: Tensor) -> list[Tensor]:
    """Inputs of a model's dtype, on its device."""
    return [tensor.to(next(model.parameters())) for tensor in tensors]


torch.manual_seed(0)
before, channels, times, words, pixels = (
    (320, 640, 1280, 768, 32) if on_gpu else (64, 96, 128, 64, 8)
)
block = CrossAttnDownBlock2D(
    before, channels, times, num_layers=2, num_attention_heads=8, cross_attention_dim=words
)
x, step, text = (
    torch.randn(2, before, pixels, pixels),
    torch.randn(2, times),
    torch.randn(2, 77, words),
)
compare("UNet block", block, lambda model: model(*like(model, x, step, text))[0])

widths, pixels = ((128, 256, 512, 512), 64) if on_gpu else ((64, 96), 8)
decoder = Decoder(4, 3, ("UpDecoderBlock2D",) * len(widths), widths, layers_per_block=2)
latents = torch.randn(1, 4, pixels, pixels)
compare("VAE decoder", decoder, lambda model: model(*like(model, latents)))
