"""Quantise a model of transformers in place, save it packed, and load it again."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import cutlass_ops as co

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=320,
)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(0, config.vocab_size, (1, 12))
with torch.no_grad():
    floats = model(tokens).logits

co.quantize_model(model, bits=8, group_size=32)
with torch.no_grad():
    quantised = model(tokens).logits
print(f"logits differ by {100 * float((quantised - floats).norm() / floats.norm()):.2f} %")

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
with torch.no_grad():
    print(
        "loaded:",
        "the same logits" if torch.equal(again(tokens).logits, quantised) else "other logits",
    )
