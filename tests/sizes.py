"""The sizes of tiny models of transformers, which several test modules make."""

from __future__ import annotations

from typing import Any

DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
