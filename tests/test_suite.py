"""What the other tests rely on in the tools that run them."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("kept_together")
def test_one_worker_runs_a_group(request):
    # Otherwise its tests compute again what they share, and meet at the same ports.
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@kept_together"), (
            f"pytest-xdist forgets the groups of tests with pytest {pytest.__version__}"
        )
