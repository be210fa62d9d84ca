"""The core table once more as two processes × 4 devices, on loopback with gloo."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import free_address, run_together
from strategies import STRATEGIES

SCRIPT = Path(__file__).with_name("two_processes.py")
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV", "XLA_FLAGS")


def run_two_processes(law: str, names: list[str], timeout_s: float) -> list[str]:
    """What both processes printed; raises if one fails. Neither outlives this call."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    address = free_address()
    arguments = [(address, index, law, *names) for index in range(2)]
    codes, texts = run_together(SCRIPT, arguments, env, timeout_s)
    assert codes == [0, 0], "\n\n".join(text[-3000:] for text in texts)
    return texts


def _check(law: str, names: list[str], timeout_s: float) -> None:
    for text in run_two_processes(law, names, timeout_s):
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
def test_two_processes_train_every_row_as_one_device_does() -> None:
    _check("train", [row.name for row in STRATEGIES if row.name != "model-dense"], timeout_s=1500)


@pytest.mark.full
def test_two_processes_read_save_and_load_sharded_models() -> None:
    _check("save", ["model-dense", "fsdp-dense"], timeout_s=300)
