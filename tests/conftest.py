"""Compile the many small programs of these tables quickly."""

from __future__ import annotations

import os

# LLVM's own optimizations take half the time of a test here; they come after XLA has partitioned
# the program, so the laws are about the same program without them.
_QUICKLY = "--xla_backend_optimization_level=0"

if _QUICKLY not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICKLY}".strip()
