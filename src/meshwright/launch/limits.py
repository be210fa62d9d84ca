"""How long a section of a rank may take: learnt from what those of all ranks have taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

OWN = ("script", "callbacks")  # sections of the program's own code, which may take any time
SCRIPT_S = 120.0
SCRIPT_SETTING = "--script-timeout, MESHWRIGHT_SCRIPT_TIMEOUT"
_FIRST_S = {"join": 600.0, "compile": 1800.0, "save": 600.0}
_TIMES_WORKING = 5.0
_SEEN_S = 2.0
_LEARNT = ("input", "step", "batch callbacks")
_FIRST_STEPS = 32  # the host runs ahead of the devices at first, and its steps seem short
_TIMES_FIRST = 12.0  # of the shortest limit: connections are made, and buffers filled
_TIMES_TOGETHER_FIRST = 30.0
_TIMES_TOGETHER = 6.0
_TIMES_TWICE = 5.0
_TIMES_ONCE = 2.0
_ONCE_S = 3600.0  # for so long


class _Span(NamedTuple):
    took_s: float
    ended_s: float


def seconds_faults(**settings: object) -> list[str]:
    """What is wrong with settings that must be numbers of seconds above 0.

    >>> seconds_faults(stall_s=10.0, script_s="soon")
    ["script_s must be above 0 seconds; received 'soon'."]
    """
    return [
        f"{name} must be above 0 seconds; received {value!r}."
        for name, value in settings.items()
        if not (isinstance(value, int | float) and value > 0)
    ]


@dataclass
class Limits:
    """How long a section may take, learnt from those that were seen to end.

    Input, step and batch callbacks may take ``shortest_s``, and 12 times that during the first 32
    steps. Before a rank joins it is ``join_s``, in the compiler 30 minutes, in a save 10 minutes.
    In code of the program's own, for which others wait, it is ``script_s`` where a rank does
    nothing, which is not learnt, and five times that where it works.
    Five times what a section has taken twice is allowed in any case, and for an hour twice what
    it has taken once: a single hitch must not set the limit of a whole run.

    >>> limits = Limits(shortest_s=10.0)
    >>> limits.of("input", now_s=0.0)
    120.0
    >>> limits.learn("input", 8.0, steps=100, ended_s=10.0)
    >>> limits.of("input", now_s=11.0), limits.of("step", now_s=11.0)
    (16.0, 10.0)
    >>> limits.learn("input", 7.0, steps=120, ended_s=30.0)
    >>> limits.of("input", now_s=31.0)
    35.0
    """

    shortest_s: float = 10.0
    join_s: float = 60.0
    script_s: float = SCRIPT_S
    steps: int = 0
    _longest: dict[str, list[_Span]] = field(default_factory=dict)

    def learn(self, section: str, took_s: float, steps: int, ended_s: float) -> None:
        """Take note of a section that ended; ``steps`` is how many steps had begun by then."""
        self.steps = max(self.steps, steps)
        stretches = self._longest.setdefault(section, [])
        if len(stretches) == 2 and took_s <= stretches[1].took_s:
            return
        # What holds one rank up holds all of them up: sections of one time are one event.
        same = [s for s in stretches if _overlap(s, took_s, ended_s)]
        longest = max(_Span(took_s, ended_s), *same) if same else _Span(took_s, ended_s)
        others = [s for s in stretches if s not in same]
        self._longest[section] = sorted([longest, *others], reverse=True)[:2]

    def of(self, section: str, now_s: float) -> float:
        """How long the section may take, in seconds."""
        if section == "launch":
            return self.join_s
        if section in OWN:
            first_s = _TIMES_WORKING * self.script_s
        elif section not in _LEARNT:
            first_s = _FIRST_S.get(section, _TIMES_TOGETHER_FIRST * self.shortest_s)
        else:
            first_s = self.shortest_s * (1.0 if self._is_known else _TIMES_FIRST)
        return max(first_s, self._learnt_s(section, now_s))

    def together(self, section: str, now_s: float) -> float:
        """How long it may take where no rank is behind the others: it may be a long step.

        >>> Limits(join_s=60.0).together("launch", now_s=0.0)
        60.0
        """
        if section == "launch":
            return self.join_s
        times = _TIMES_TOGETHER if self._is_known else _TIMES_TOGETHER_FIRST
        return max(times * self.shortest_s, self.of(section, now_s))

    @property
    def named_s(self) -> float:
        """After how long a rank is named that others wait for; native waits are known by then."""
        return self.shortest_s + _SEEN_S

    @property
    def native_wait_s(self) -> float:
        """How long a wait in native code must be to count as one at all."""
        return self.shortest_s / 2

    @property
    def unseen_wait_s(self) -> float:
        """How long a wait that the rank itself does not report must be to end the group for.

        >>> Limits(shortest_s=10.0).unseen_wait_s
        60.0
        """
        return _TIMES_TOGETHER * self.shortest_s

    @property
    def _is_known(self) -> bool:
        return self.steps > _FIRST_STEPS

    def _learnt_s(self, section: str, now_s: float) -> float:
        longest = self._longest.get(section, ())
        twice_s = _TIMES_TWICE * longest[1].took_s if len(longest) == 2 else 0.0
        recent = [s.took_s for s in longest if now_s - s.ended_s < _ONCE_S]
        return max(twice_s, _TIMES_ONCE * max(recent, default=0.0))


def _overlap(span: _Span, took_s: float, ended_s: float) -> bool:
    return span.ended_s > ended_s - took_s and ended_s > span.ended_s - span.took_s
