"""Where long texts of several processes first differ, found with little to send.

Each process first sends one short fingerprint of its program. Where these differ, every process is
asked for fingerprints of prefixes of its list of texts, a few at a time, until the first text that
differs is known. Only that text is sent.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

_AT_ONCE = 64
_NO_MORE = "nothing more"
_BEFORE = 60  # characters that are shown before the first that differs


class Outlined(str):
    """A fact with the list of texts that it stands for, made when it is asked for.

    ``texts`` gives of each the text that is compared, and how it is shown.
    """

    texts: Callable[[], Sequence[tuple[str, str]]]

    def __new__(cls, fact: str, texts: Callable[[], Sequence[tuple[str, str]]]) -> Self:
        """The fact itself is the string."""
        made = super().__new__(cls, fact)
        made.texts = texts
        return made


class Outline:
    """The texts of one fact in one process, which answers for them."""

    def __init__(self, texts: Sequence[tuple[str, str]]) -> None:
        self._shown = [shown for _, shown in texts]
        self._beginnings = [""]
        digest = hashlib.blake2b(digest_size=8)
        for text, _ in texts:
            digest.update(text.encode() + b"\0")
            self._beginnings.append(digest.hexdigest())

    def answer(self, ends: Sequence[int]) -> list[str]:
        """Fingerprints of the texts before each of the ``ends``; for one below 0, that text itself.

        The first answer of all is for no ends: how many texts there are.

        >>> outline = Outline([("a = 1", "x.py:1: a = 1"), ("b = 2", "x.py:2: b = 2")])
        >>> outline.answer([]), outline.answer([-2]), outline.answer([-3])
        (['2'], ['x.py:2: b = 2'], ['nothing more'])
        """
        if not ends:
            return [str(len(self._shown))]
        if len(ends) == 1 and ends[0] < 0:
            number = -ends[0]
            return [self._shown[number - 1] if number <= len(self._shown) else _NO_MORE]
        last = len(self._shown)
        return [self._beginnings[end] if end <= last else f"only {last}" for end in ends]


@dataclass
class Search:
    """The search for the first text that differs: :meth:`asks`, then :meth:`take`, until done.

    >>> ours = Outline([(str(n), f"line {n}") for n in range(1000)])
    >>> theirs = Outline([(str(n + (n > 700)), f"line {n}") for n in range(1000)])
    >>> search = Search("step", {0, 1})
    >>> while search.shown is None:
    ...     ends = search.asks()
    ...     search.take({0: ours.answer(ends), 1: theirs.answer(ends)})
    >>> search.title, search.shown
    ('step, first at part 702 of 1000', {0: 'line 701', 1: 'line 701'})
    """

    name: str
    ranks: set[int]
    shown: dict[int, str] | None = None  # the result; empty where none differs
    _known: int = 0  # so many texts are alike
    _end: int = -1  # and so many are not
    _length: int = 0
    _asked: list[int] = field(default_factory=list)

    def asks(self) -> list[int]:
        """What every process is asked next, for :meth:`Outline.answer`."""
        if self._end < 0:
            self._asked = []
        elif self._end - self._known == 1:
            self._asked = [-self._end]
        else:
            span = self._end - self._known
            ends = {self._known + span * (i + 1) // _AT_ONCE for i in range(_AT_ONCE)}
            self._asked = sorted(ends - {self._known})
        return self._asked

    def take(self, answers: Mapping[int, Sequence[str]]) -> None:
        """What each has answered."""
        if self._end < 0:
            self._length = max(int(answer[0]) for answer in answers.values())
            self._end = self._length
            if not self._length:
                self.shown = {}
            return
        if len(self._asked) == 1 and self._asked[0] < 0:
            self.shown = {rank: answer[0] for rank, answer in answers.items()}
            return
        for number, end in enumerate(self._asked):
            if len({answer[number] for answer in answers.values()}) > 1:
                self._end = end
                return
            self._known = end
        self.shown = {}  # they are alike

    @property
    def title(self) -> str:
        """Which of the texts it is, in words."""
        return f"{self.name}, first at part {self._end} of {self._length}"


def windows(texts: Mapping[int, str]) -> dict[int, str]:
    """Long texts from shortly before they first differ; nothing where they are alike.

    >>> windows({0: "a" * 100 + "b", 1: "a" * 100 + "c"})[1] == "…" + "a" * 60 + "c"
    True
    """
    if len(set(texts.values())) < 2:
        return {}
    alike = itertools.takewhile(
        lambda letters: len(set(letters)) == 1, zip(*texts.values(), strict=False)
    )
    begin = sum(1 for _ in alike) - _BEFORE
    return {r: f"…{text[begin:]}" if begin > 0 else text for r, text in sorted(texts.items())}
