"""Ask which kernel a product would run on a GPU, with or without one."""

import torch

import cutlass_ops as co

weight = co.quantize(torch.randn(512, 1024), bits=4, group_size=128)
packed = co.reorder(weight)
for device in ("sm_80", "sm_90"):
    for rows in (1, 16, 256, 4096):
        explanation = co.explain(
            rows, packed, act_quant="block", dtype=torch.float16, device=device
        )
        print(f"{device}  {rows:5d} rows  {' + '.join(explanation.launches):45s} {explanation.why}")
