"""When a group is started again, and on which places: a rule over what failed and what was saved.

The idea of a group between a least and a most number of processes is Horovod's and torchrun's;
that failures count only until the run has got further is from neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .failure import Failure

MOST = "MESHWRIGHT_MOST_PROCESSES"  # of an elastic group, whatever there are now
FAILURES = "MESHWRIGHT_FAILURES"  # "2 in 310.5": how often the group failed, in how many seconds
_START_S = 60.0  # for a program to read its data and make its model
_TWICE = 2  # failures of one place in a row


@dataclass
class Elastic:
    """With how many processes a group is started again, and how often.

    There are ``most`` places for processes on this host. A group that failed is started again, at
    most ``max_restarts`` times without a newer checkpoint. A place whose process failed twice in a
    row, with no newer checkpoint between, is set aside while ``least`` others are left.

    >>> rule = Elastic(least=2, most=3, max_restarts=3)
    >>> killed = Failure(1, 3, "n01", 17, "step", 9, "was killed by signal 9", exit_code=137)
    >>> rule.why_not_again(killed, saved=5, place=1), rule.places()
    (None, [0, 1, 2])
    >>> rule.why_not_again(killed, saved=5, place=1), rule.places()
    (None, [0, 2])
    """

    least: int
    most: int
    max_restarts: int
    restarts: int = 0
    _in_vain: int = 0  # failures since the newest checkpoint
    _saved: int = -1
    _of_place: dict[int, int] = field(default_factory=dict)
    _aside: set[int] = field(default_factory=set)

    def why_not_again(self, failure: Failure, saved: int, place: int | None = None) -> str | None:
        """Why the group is given up after this failure, if it is; ``None``: it is started again.

        ``saved`` is the step of the newest checkpoint, -1 if there is none.
        """
        if not self.max_restarts:
            return ""
        if saved > self._saved:
            self._saved, self._in_vain = saved, 0
            self._of_place.clear()
            self._aside.clear()  # they get another chance
        self._in_vain += 1
        if place is not None:
            self._of_place[place] = self._of_place.get(place, 0) + 1
            if self._of_place[place] >= _TWICE and len(self.places()) > self.least:
                self._aside.add(place)
        if not self.restarts and _is_of_program(failure):
            return (
                "The program fails soon, before any step was counted, so it is not started again. "
                "(A loop of its own counts its steps by mw.begin_step().)"
            )
        if self._in_vain > self.max_restarts:
            times = f"{self.max_restarts} restarts without a newer checkpoint"
            return f"It is not started again after {times}."
        self.restarts += 1
        return None

    def places(self, present: int | None = None) -> list[int]:
        """The places that are used next, of the first ``present`` ones.

        Where too few are left, those that were set aside are used again.
        """
        first = range(self.most if present is None else min(present, self.most))
        rest = [place for place in first if place in self._aside]
        again = rest[: max(0, self.least - (len(first) - len(rest)))]
        return [place for place in first if place not in self._aside or place in again]


def _is_of_program(failure: Failure) -> bool:
    """Whether it is the program's own and comes again: before any step, no signal or lost host.

    A loop that counts no steps has begun where the program ran for long outside of the compiler.
    """
    is_before_steps = failure.step == 0 and failure.uncounted_s < _START_S
    return failure.pid != 0 and is_before_steps and failure.exit_code <= 128


def most_processes(environment: Mapping[str, str] | None = None) -> int:
    """How many processes this group has when all are there; 0 if it is not elastic."""
    text = (os.environ if environment is None else environment).get(MOST, "")
    return int(text) if text.isdecimal() else 0


def failures_text(times_s: Iterable[float], ran_s: float) -> str:
    """Failures at these times of a run, as the processes of the next start read them.

    >>> failures_text([20.0, 300.0], 310.5)
    '2 in 310.5'
    """
    return f"{len(list(times_s))} in {ran_s:.1f}"


def read_failures(environment: Mapping[str, str] | None = None) -> tuple[int, float]:
    """What :func:`failures_text` wrote: how many, and in how many seconds.

    >>> read_failures({"MESHWRIGHT_FAILURES": "2 in 310.5"}), read_failures({})
    ((2, 310.5), (0, 0.0))
    """
    text = (os.environ if environment is None else environment).get(FAILURES, "")
    number, _, seconds = text.partition(" in ")
    return (int(number), float(seconds)) if seconds else (0, 0.0)
