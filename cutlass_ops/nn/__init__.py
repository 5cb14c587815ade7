"""Layers with packed weights, and functions that put them into models."""

from .conv import MixedConv, MixedConv1d, MixedConv2d, MixedConv3d, replace_convs
from .embedding import MixedEmbedding, TiedEmbedding
from .experts import MixedExperts
from .gated_mlp import GatedMLP
from .linear import Fused, FusedPart, MixedLinear, fuse_linears, replace_linears, set_activations

__all__ = [
    "Fused",
    "FusedPart",
    "GatedMLP",
    "MixedConv",
    "MixedConv1d",
    "MixedConv2d",
    "MixedConv3d",
    "MixedEmbedding",
    "MixedExperts",
    "MixedLinear",
    "TiedEmbedding",
    "fuse_linears",
    "replace_convs",
    "replace_linears",
    "set_activations",
]
