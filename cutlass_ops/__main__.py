"""``python -m cutlass_ops`` is the command line."""

from .cli import main

main()
