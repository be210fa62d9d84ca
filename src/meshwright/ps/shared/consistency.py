"""How far workers may run ahead of each other: one switch, as a value.

``"async"`` is TensorFlow's parameter-server training (Hogwild, Downpour SGD), ``"sync"`` a barrier
after each step, :class:`Stale` the stale-synchronous rule (Ho et al. 2013), and :class:`Backup`
synchronous training that does not wait for the slowest (Chen et al. 2016).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import ClusterError


@dataclass(frozen=True)
class Async:
    """Every update is applied as it comes.

    ``by_staleness`` divides the learning rate by an update's staleness (Zhang et al. 2016), and
    ``compensation`` is the factor of delay compensation (DC-ASGD, Zheng et al. 2017); with
    ``adaptive`` it is divided by the root of the running mean of the gradient's square (DC-ASGD-a).

    >>> Async(compensation=0.04)
    Async(by_staleness=False, compensation=0.04, adaptive=False)
    """

    by_staleness: bool = False
    compensation: float = 0.0
    adaptive: bool = False

    def __post_init__(self) -> None:
        _check_options(self.compensation, self.adaptive)


@dataclass(frozen=True)
class Stale:
    """No worker starts a step when it is more than ``bound`` steps ahead of the slowest one.

    ``by_staleness``, ``compensation`` and ``adaptive`` are those of :class:`Async`. (Ho et al.
    2013)

    >>> Stale(3)
    Stale(bound=3, by_staleness=False, compensation=0.0, adaptive=False)
    """

    bound: int
    by_staleness: bool = False
    compensation: float = 0.0
    adaptive: bool = False

    def __post_init__(self) -> None:
        _check_whole("Stale", self.bound, least=0)
        _check_options(self.compensation, self.adaptive)


@dataclass(frozen=True)
class Sync:
    """One step of every worker makes one update, from the mean of their gradients."""


@dataclass(frozen=True)
class Backup:
    """As :class:`Sync`, but the last ``spare`` gradients of each round are not waited for.

    >>> Backup(1)
    Backup(spare=1)
    """

    spare: int

    def __post_init__(self) -> None:
        _check_whole("Backup", self.spare, least=1)


Consistency = Async | Stale | Sync | Backup


def consistency_of(choice: str | Consistency) -> Consistency:
    """The value that ``"async"`` or ``"sync"`` stands for; values as they are.

    Raises :class:`~meshwright.errors.ClusterError` for anything else.

    >>> consistency_of("sync")
    Sync()
    """
    if isinstance(choice, Async | Stale | Sync | Backup):
        return choice
    named = {"async": Async(), "sync": Sync()}
    if choice not in named:
        raise ClusterError(
            "consistency must be 'async', 'sync', Stale(bound) or Backup(spare); "
            f"received {choice!r}."
        )
    return named[choice]


def gradient_options(consistency: Consistency) -> dict[str, Any]:
    """What servers must know of each gradient.

    >>> gradient_options(Async(by_staleness=True)), gradient_options(Sync())
    ({'staleness': True}, {})
    """
    options: dict[str, Any] = {}
    if isinstance(consistency, Async | Stale):
        if consistency.by_staleness:
            options["staleness"] = True
        if consistency.compensation:
            options["compensation"] = consistency.compensation
            options["adaptive"] = consistency.adaptive
    return options


def _check_whole(name: str, number: object, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ClusterError(f"{name} needs a whole number, at least {least}; received {number!r}.")


def _check_options(compensation: float, adaptive: bool) -> None:
    if not compensation >= 0:
        raise ClusterError(f"compensation must be at least 0; received {compensation!r}.")
    if adaptive and not compensation:
        raise ClusterError(
            "adaptive=True is how delays are compensated: give compensation= too, 2.0 for example."
        )
