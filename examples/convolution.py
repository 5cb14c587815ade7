"""Replace a network's convolutions by packed ones, compare what each format loses, and run one of
them in static int8.
"""

import copy

import torch
from torch import nn

import cutlass_ops as co

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(16, 64, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(64, 128, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(128, 32, 1),
).eval()
convolutions = {
    name: module.weight.detach()
    for name, module in net.named_modules()
    if isinstance(module, nn.Conv2d)
}
x = torch.randn(2, 16, 24, 24)

with torch.no_grad():
    exact = net(x)
    for bits, act_quant in ((8, "none"), (8, "block"), (4, "none"), (4, "block")):
        packed = {
            name: co.reorder(co.quantize(w, bits=bits, group_size=32))
            for name, w in convolutions.items()
        }
        quantised = copy.deepcopy(net)
        co.replace_convs(quantised, packed, act_quant=act_quant)
        error = (quantised(x) - exact).norm() / exact.norm()
        print(
            f"int{bits} weights, x {'int8' if act_quant == 'block' else 'fp32'}   error "
            f"{100 * float(error):5.2f} %"
        )

    # The first layer as a runtime for ONNX would compute it: codes in, codes out.
    weight = co.reorder(co.quantize(convolutions["0"], bits=8, group_size=-1))
    expected = net[1](net[0](x))
    x_scale, y_scale = float(x.abs().max()) / 127, float(expected.max()) / 255
    codes = (x / x_scale).round().to(torch.int8)
    y = co.conv2d_int8(
        codes,
        weight,
        net[0].bias,
        padding=1,
        x_scale=x_scale,
        y_scale=y_scale,
        activation="relu",
        out_dtype=torch.uint8,
    )
    error = (y * y_scale - expected).norm() / expected.norm()
    print(f"one layer, static int8   error {100 * float(error):5.2f} %")
