"""The lines for curl of the guide run, against the app and a Keras model."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from http_calls import listening
from http_models import served

from meshwright.serving.http.app import serving_app

pytestmark = pytest.mark.alone

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serve_http.md"
LINES = re.findall(r"^curl .*$", GUIDE.read_text(), re.MULTILINE)
ANSWER = np.array([[1, 2, 3, 4]]) @ np.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listening(serving_app(served("sums"))) as port:
        yield port


def test_there_are_lines():
    assert len(LINES) >= 8


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:70])
def test_a_line_of_curl_answers(line, port):
    words = shlex.split(line.replace("localhost:8000", f"127.0.0.1:{port}"))
    result = subprocess.run([*words, "--fail"], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stdout + result.stderr
    if "-d" in words:
        numbers = re.findall(r"-?\d+\.\d+", result.stdout)
        assert np.allclose([float(number) for number in numbers][-3:], ANSWER), result.stdout
