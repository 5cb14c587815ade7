"""What other packages learn of packed models: transformers, diffusers, PEFT and huggingface_hub."""
