"""Which steps a server has applied, and whose pushes it refuses: what makes updates exact."""

from __future__ import annotations

from ...errors import FencedError


class AppliedSteps:
    """The ids of applied steps, with the server's version at which each was.

    Steps below the watermark have ended for good: they count as applied, and their ids need not
    be kept.

    >>> steps = AppliedSteps()
    >>> steps.add(4, version=1)
    >>> 4 in steps, 5 in steps
    (True, False)
    >>> steps.forget_below(5)
    >>> 4 in steps, len(steps)
    (True, 0)
    """

    def __init__(self, below: int = 0, versions: dict[int, int] | None = None) -> None:
        self.below = below
        self._versions = dict(versions or {})

    def __contains__(self, step: int) -> bool:
        return step < self.below or step in self._versions

    def __len__(self) -> int:
        return len(self._versions)

    @property
    def first_free(self) -> int:
        """An id above that of every step that counts as applied.

        >>> AppliedSteps(below=7, versions={9: 1}).first_free
        10
        """
        return max(self.below, 1 + max(self._versions, default=-1))

    @property
    def versions(self) -> dict[int, int]:
        """The ids that are kept, with their versions; a copy."""
        return dict(self._versions)

    def version_of(self, step: int) -> int | None:
        """At which version a step was applied; ``None`` where that is forgotten."""
        return self._versions.get(step)

    def add(self, step: int, version: int) -> None:
        """A step has been applied."""
        self._versions[step] = version

    def forget_below(self, below: int) -> None:
        """All steps below have ended; the watermark never goes back."""
        if below <= self.below:
            return
        # The ids come nearly in order, so that most often few are gone through.
        if below - self.below <= len(self._versions):
            for step in range(self.below, below):
                self._versions.pop(step, None)
        else:
            self._versions = {s: v for s, v in self._versions.items() if s >= below}
        self.below = below


class Fences:
    """The incarnations of workers that were declared dead: nothing of theirs is taken any more."""

    def __init__(self, fenced: frozenset[str] = frozenset()) -> None:
        self.fenced = set(fenced)

    def add(self, incarnation: str) -> bool:
        """Fence an incarnation; returns whether it was not fenced before."""
        new = incarnation not in self.fenced
        self.fenced.add(incarnation)
        return new

    def check(self, incarnation: str | None, task: str) -> None:
        """Raise :class:`~meshwright.errors.FencedError` for a fenced incarnation."""
        if incarnation and incarnation in self.fenced:
            raise FencedError(
                f"{task} takes nothing from incarnation {incarnation!r}: it was declared dead, and "
                "its work was given to others. Join again, as a new incarnation.",
                task,
            )
