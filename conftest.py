"""A strict room: eight virtual devices, warnings as errors, a fixed seed; minutes by room."""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from pathlib import Path, PurePosixPath

import hypothesis
import pytest

import meshwright as mw

os.environ["MESHWRIGHT_CACHE"] = "off"  # what is compiled here is not kept for anybody
mw.virtual_devices(8)

# A shell ignores interrupts for what it starts in the background; tests of Ctrl-C need them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast an example is says how busy the machine is, and nothing of what is tested.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

_SHORT_RUN_S = 60
_ONE_MARK = re.compile(r"(alone|targets)( and not \w+)*")
_seconds_by_room: dict[str, float] = defaultdict(float)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests with one mark are asked for, import only modules in which it is written."""
    asked = _ONE_MARK.fullmatch(config.option.markexpr)
    if asked and collection_path.suffix == ".py" and collection_path.is_file():
        return f"mark.{asked[1]}" not in collection_path.read_text() or None
    return None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a test's seconds to those of its room."""
    _seconds_by_room[_room(report.nodeid)] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a table of minutes by room, so that growth is seen."""
    total_s = sum(_seconds_by_room.values())
    if total_s < _SHORT_RUN_S:
        return
    terminalreporter.section("minutes by room")
    for room, seconds in sorted(_seconds_by_room.items(), key=lambda pair: -pair[1]):
        terminalreporter.write_line(f"{seconds / 60:6.1f}  {seconds / total_s:4.0%}  {room}")
    terminalreporter.write_line(f"{total_s / 60:6.1f}  100%  all, summed over worker processes")


def _room(nodeid: str) -> str:
    """The folder of a test; modules directly in ``tests`` and doctests are one room each."""
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    if parts[0] != "tests":
        return "doctests"
    return "/".join(parts[:-1][:3])
