#!/usr/bin/env python3
"""The command ``cutlass-ops reorder`` as a script: reorder_weights.py FILE -o OUT
[--bits 4|8 ...].
"""

import sys

from cutlass_ops.cli import app

app(["reorder", *sys.argv[1:]], prog_name="reorder_weights.py")
