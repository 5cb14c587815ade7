"""Packed models in other packages: transformers, diffusers, PEFT and huggingface_hub."""
