"""Packed files and model directories: planned, written, read and checked."""

from .conversion_plan import Options

__all__ = ["Options"]
