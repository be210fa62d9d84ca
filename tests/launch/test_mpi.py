"""A real ``mpirun`` (Debian's openmpi-bin) starts the processes of a group."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from watching import LOSS

PROGRAM = str(Path(__file__).parent / "grouped.py")

pytestmark = [
    pytest.mark.alone,
    pytest.mark.targets,
    pytest.mark.skipif(
        shutil.which("mpirun") is None, reason="not installed: mpirun (apt-get install openmpi-bin)"
    ),
]


def mpirun(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        ["mpirun", "--oversubscribe", "-n", "2", sys.executable, PROGRAM, str(folder), how],
        env={**env, **as_root},
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_mpirun_starts_a_group(tmp_path):
    run = mpirun(tmp_path, "nothing")
    assert run.returncode == 0, run.stderr
    assert len(re.findall(LOSS, run.stdout)) == 2, run


def test_a_process_that_stops_is_named(tmp_path):
    run = mpirun(tmp_path, "stop")  # of which mpirun itself says nothing
    assert run.returncode != 0
    assert json.loads((tmp_path / "seen").read_text())["rank"] == 1
    assert "rank 1 of 2" in run.stderr
    assert "is stopped" in run.stderr
