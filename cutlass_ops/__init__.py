"""Mixed-precision GEMM for quantised weights, built on CUTLASS."""

__version__ = "0.1.0"
