"""Checkpoints of two processes × 4 devices: written, read by one process, and the other way."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from ports import free_address
from processes import run_together

import meshwright as mw

SCRIPT = Path(__file__).with_name("checkpoint_processes.py")
LIMIT_S = 200


def run(count: int, directory: Path, epochs: int, strategy: str, stop: int = 0) -> list[float]:
    """Losses per epoch, which all processes agree on; fails unless each ends with code 0."""
    codes, texts = processes(count, directory, epochs, strategy, stop)
    assert codes == [0] * count, "\n\n".join(text[-3000:] for text in texts)
    first, *others = [json.loads(text.splitlines()[-1])["loss"] for text in texts]
    assert all(other == first for other in others)
    return first


def processes(
    count: int, directory: Path, epochs: int, strategy: str, stop: int = 0
) -> tuple[list[int], list[str]]:
    """Exit codes and outputs; with ``stop`` the first process sends itself SIGTERM then."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    address = free_address()
    arguments = [
        (address, index, count, directory, epochs, strategy, stop if index == 0 else 0)
        for index in range(count)
    ]
    return run_together(SCRIPT, arguments, environment, LIMIT_S)


@pytest.mark.full
def test_processes_write_what_one_reads_and_the_other_way(tmp_path: Path) -> None:
    whole = run(1, tmp_path / "whole", 4, "zero3")
    two = run(2, tmp_path / "run", 2, "zero3")
    newest = mw.read_checkpoint(tmp_path / "run").directory
    written = [bytes_in(newest / f"ocdbt.process_{index}") for index in (0, 1)]
    assert max(written) < 0.7 * sum(written)  # each its own half of what is split
    one = run(1, tmp_path / "run", 3, "model")
    again = run(2, tmp_path / "run", 4, "dp")
    assert one[:2] == two
    assert again[:3] == one
    np.testing.assert_allclose(again, whole, rtol=2e-6)
    assert [info.step for info in mw.Checkpoints(tmp_path / "run").all] == [15, 16]


@pytest.mark.full
def test_sigterm_to_one_process_saves_and_stops_all(tmp_path: Path) -> None:
    codes, texts = processes(2, tmp_path, 400, "dp", stop=6)
    assert codes == [75, 75], "\n\n".join(text[-3000:] for text in texts)
    info = mw.read_checkpoint(tmp_path)
    assert 6 <= info.step < 1600
    whole = run(1, tmp_path / "whole", 8, "dp")
    resumed = run(2, tmp_path, max(8, info.position.epoch + 1), "dp")
    np.testing.assert_allclose(resumed[:8], whole, rtol=2e-6)


@pytest.mark.full
def test_sigterm_after_the_last_batch_still_stops_all(tmp_path: Path) -> None:
    codes, texts = processes(2, tmp_path, 2, "dp", stop=8)  # JAX looks for it once a second
    assert codes == [75, 75], "\n\n".join(text[-3000:] for text in texts)
    assert mw.read_checkpoint(tmp_path).step == 8
    assert len(run(2, tmp_path, 2, "dp")) == 2


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
