"""The model of ``test_served_by_processes.py``, as ``meshwright serve --model`` builds it."""

from serving_group import build

__all__ = ["build"]
