"""How long ``import meshwright`` and ``meshwright --help`` take, as whole processes."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from environments import clean_environment
from quiet import Quiet
from settings import HELP_LIMIT_S, IMPORT_LIMIT_S, START_UP_RUNS

_HEAVY = ("jax", "keras", "numpy")
_IMPORT = f"import sys, meshwright; sys.exit(any(name in sys.modules for name in {_HEAVY}))"


def measure(runs: int = START_UP_RUNS) -> list[dict[str, Any]]:
    """Median wall time of each command, with its limit; bare Python beside it."""
    python = [sys.executable, "-c"]
    rows = [
        _row("python -c pass", [*python, "pass"], None, runs),
        _row("import meshwright", [*python, _IMPORT], IMPORT_LIMIT_S, runs),
    ]
    program = _program()
    if program is None:
        sys.exit("The program `meshwright` is not beside this Python: install the project first.")
    return [*rows, _row("meshwright --help", [program, "--help"], HELP_LIMIT_S, runs)]


def _row(name: str, command: list[str], limit_s: float | None, runs: int) -> dict[str, Any]:
    times_s = [_time_s(name, command) for _ in range(runs + 1)][1:]  # the first one fills caches
    return {
        "command": name,
        "median_s": statistics.median(times_s),
        "times_s": times_s,
        "limit_s": limit_s,
    }


def _time_s(name: str, command: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    if done.returncode != 0:
        sys.exit(
            f"`{name}` ended with {done.returncode} (an import is refused where it loads one of "
            f"{', '.join(_HEAVY)}):\n{done.stdout}{done.stderr}"
        )
    return time.perf_counter() - start


def _program() -> str | None:
    beside = Path(sys.executable).parent
    return shutil.which("meshwright", path=str(beside)) or shutil.which("meshwright")


if __name__ == "__main__":
    quiet = Quiet.wait()
    for row in measure():
        limit = "" if row["limit_s"] is None else f" (limit {row['limit_s']} s)"
        print(f"{row['command']:20} {row['median_s']:.3f} s{limit}")
    print(quiet.line())
