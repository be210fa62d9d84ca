"""The core table once more in groups of the launcher: 2 × 4 and 4 × 2 processes × devices.

``MESHWRIGHT_ALL_ROWS=1`` asks every row of 4 × 2, too: over ten minutes of CPU time for all 22.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from strategies import STRATEGIES

SCRIPT = Path(__file__).with_name("group_laws.py")
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV", "XLA_FLAGS")
NAMES = [row.name for row in STRATEGIES]

# On a mesh of four processes each axis lies within some of them and across others; these are the
# ways in which it does: a model's axis inside of each, batches and halos across, shares of all.
SOME = ("model-tokens", "data-fsdp-dense", "spatial-images", "zero3-model-wide")
OF_FOUR = NAMES if os.environ.get("MESHWRIGHT_ALL_ROWS") else SOME


def run_group(law: str, names: list[str], timeout_s: float, processes: int = 2) -> list[str]:
    """What each process printed; raises if one fails. None outlives this call."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    options = ["--processes", str(processes), "--devices", str(8 // processes)]
    command = [sys.executable, "-m", "meshwright.cli", "launch", *options, str(SCRIPT), law, *names]
    result = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    lines = [line.partition("] ") for line in result.stdout.splitlines()]
    return [
        "\n".join(text for name, _, text in lines if name == f"[rank:{rank}")
        for rank in range(processes)
    ]


def _check(law: str, names: list[str], timeout_s: float, processes: int = 2) -> None:
    for text in run_group(law, names, timeout_s, processes):
        assert [line for line in text.splitlines() if line.endswith(": ok")] == [
            f"{row.name}: ok" for row in STRATEGIES if row.name in names
        ]


@pytest.mark.full
def test_two_processes_train_as_one_device_does() -> None:
    _check("train", ["model-dense"], timeout_s=300)


@pytest.mark.full
def test_each_process_reads_only_what_its_devices_need() -> None:
    _check("input", ["model-dense"], timeout_s=300)


@pytest.mark.full
def test_each_process_reads_the_rows_that_it_is_dealt() -> None:
    _check("shard", ["model-dense"], timeout_s=300)


@pytest.mark.full
def test_each_process_reads_its_share_of_the_batches_of_a_pydataset() -> None:
    _check("batches", ["model-dense"], timeout_s=300)


@pytest.mark.full
def test_an_epoch_of_batches_that_processes_make_ends_for_all_where_the_first_has_none() -> None:
    _check("own_batches", ["model-dense"], timeout_s=300)


@pytest.mark.full
def test_two_processes_train_every_row_as_one_device_does() -> None:
    _check("train", [row.name for row in STRATEGIES if row.name != "model-dense"], timeout_s=1500)


@pytest.mark.full
def test_two_processes_read_save_and_load_sharded_models() -> None:
    _check("save", ["model-dense", "fsdp-dense"], timeout_s=300)


@pytest.mark.full
def test_four_processes_train_as_one_device_does() -> None:
    _check("train", [name for name in NAMES if name in OF_FOUR], timeout_s=3000, processes=4)
