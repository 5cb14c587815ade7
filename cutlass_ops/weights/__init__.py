"""Quantised weights: their formats, one in canonical order, and one in the order of the kernels.
Imports no other room.
"""
