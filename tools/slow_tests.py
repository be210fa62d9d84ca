"""Which tests leave the fast tier: reads a log of pytest, writes ``tests/slow.txt``.

    make test ARGS="--durations=0 -vv" > log
    python tools/slow_tests.py log

A test that took more than ``SLOW_S`` seconds is slow, unless it is the quickest that asks its law
and took no more than ``KEPT_S``. Tests that the log does not know stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

SLOW_S, KEPT_S = 1.5, 3.0
LIST = Path(__file__).parent.parent / "tests" / "slow.txt"
HEAD = "# Tests that `make test` leaves to `make test-full`; made by tools/slow_tests.py.\n"
LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown) +(tests/\S.*?)(?:@.*)?\n")


def main() -> None:
    took_s: dict[str, float] = defaultdict(float)
    with Path(sys.argv[1]).open() as log:
        for found in filter(None, map(LINE.match, log)):
            took_s[found[2]] += float(found[1])
    known = {name for name in LIST.read_text().splitlines() if name not in took_s}
    slow = {name for law in by_law(took_s).values() for name in slow_of(law, took_s)}
    LIST.write_text(HEAD + "".join(f"{name}\n" for name in sorted(slow | known) if name[0] != "#"))
    print(
        f"{len(slow)} of {len(took_s)} tests are slow: {sum(took_s[name] for name in slow):.0f} s"
    )


def by_law(took_s: dict[str, float]) -> dict[str, list[str]]:
    """The tests of each function, the quickest first."""
    laws: dict[str, list[str]] = defaultdict(list)
    for name in sorted(took_s, key=lambda name: took_s[name]):
        laws[name.partition("[")[0]].append(name)
    return laws


def slow_of(law: list[str], took_s: dict[str, float]) -> list[str]:
    """Those of one law that are slow."""
    slow = [name for name in law if took_s[name] > SLOW_S]
    keeps_one = len(slow) == len(law) and took_s[law[0]] <= KEPT_S
    return slow[1:] if keeps_one else slow


if __name__ == "__main__":
    main()
