"""Packed files and model directories: planned, written, read and checked."""
