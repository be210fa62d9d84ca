"""The example recommends what the hidden tastes would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "recommender.py"


@pytest.mark.full
def test_the_recommender_finds_the_hidden_tastes():
    command = [sys.executable, str(EXAMPLE), "--users", "600", "--items", "200", "--epochs", "16"]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (right,) = re.findall(r"([\d.]+)% of 600 users", result.stdout)
    assert float(right) > 95
    assert "It found the hidden tastes." in result.stdout
