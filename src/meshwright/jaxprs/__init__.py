"""Traced functions: what equations do with dims, where they repeat, how they are edited."""
