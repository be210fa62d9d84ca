"""What counts as the same: differences of two runs, weighed against one device's own rounding.

Float noise grows while a model trains, by how much depends on the model: a parameter whose exact
gradient is zero drifts under Adam by rounding alone. So nothing is guessed: one device is run again
from parameters that differ in their last bit, and what that changes, element by element, is what
another order of summation may change as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import ModelError
from ..layouts.mesh import Mesh
from ..views import Viewable

Quantity = Literal["initial value", "loss", "gradient", "value"]

_SLACK = 100.0  # times one device's own noise; 17 times was seen, for squares of noise
_INITIAL_ULPS = 16.0  # initializers are compiled for each layout


@dataclass(frozen=True)
class Tolerance:
    """``rtol`` of a variable's largest gradient, or largest change since the start.

    ``dtype`` is the coarsest float that the training step computes in and ``eps`` its spacing.
    """

    rtol: float
    dtype: str
    eps: float


@dataclass(frozen=True)
class Gap:
    """The largest difference to one device; ``relative`` to the largest element of what moves.

    That is the largest gradient of the variable, or its largest change since the start. ``excess``
    is the largest ratio of a difference to what is allowed there: above 1 it is beyond tolerance.
    """

    absolute: float
    relative: float
    excess: float

    @property
    def is_beyond(self) -> bool:
        """Whether some element differs by more than is allowed."""
        return not self.excess <= 1


@dataclass(frozen=True, order=True)
class Beyond:
    """The first time that something went beyond tolerance; steps count from 1, 0 is the start."""

    step: int
    quantity: Quantity
    path: str

    def __str__(self) -> str:
        if self.quantity == "initial value":
            return "initial value"
        return f"{self.quantity}, step {self.step}"


@dataclass(frozen=True)
class Difference:
    """One variable under a mesh and on one device; ``gradient`` is ``None`` where there is none.

    ``is_noise`` says that the variable moves by nothing but rounding on one device as well, so that
    its values prove nothing.
    """

    path: str
    role: str
    gradient: Gap | None
    value: Gap
    first: Beyond | None
    is_noise: bool = False

    @property
    def excess(self) -> float:
        """The largest ratio of a difference to what is allowed."""
        gaps = [gap.excess for gap in (self.gradient, self.value) if gap is not None]
        return max(np.inf if np.isnan(excess) else excess for excess in gaps)


@dataclass(frozen=True)
class UnderMesh:
    """A training run under one mesh, compared with one device."""

    mesh: Mesh
    variables: tuple[Difference, ...]
    losses: tuple[float, ...]  # none where the step has no log of that name, or of a part
    loss: Gap
    first: Beyond | None
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing went beyond tolerance."""
        return self.first is None

    @property
    def beyond(self) -> tuple[Difference, ...]:
        """The variables that went beyond tolerance."""
        return tuple(variable for variable in self.variables if variable.first is not None)

    def __getitem__(self, path: str) -> Difference:
        """The variable with this path."""
        for variable in self.variables:
            if variable.path == path:
                return variable
        raise KeyError(path)


@dataclass(frozen=True)
class Equivalence(Viewable):
    """The result for every mesh. ``print`` it for a table."""

    model: str
    steps: int
    tolerance: Tolerance
    losses: tuple[float, ...]  # one device's
    meshes: tuple[UnderMesh, ...]

    @property
    def equal(self) -> bool:
        """Whether the model trains alike under every mesh."""
        return all(mesh.equal for mesh in self.meshes)


@dataclass(frozen=True, eq=False)
class Run:
    """All that was seen of one run: arrays of each variable, in the order of ``variables``."""

    variables: tuple[tuple[str, str], ...]  # path and role
    values: tuple[tuple[np.ndarray, ...], ...]  # before the first step, then after each step
    gradients: tuple[np.ndarray | None, ...]  # of the first step; None where there is none
    losses: tuple[float, ...]


def judge(
    mesh: Mesh,
    run: Run,
    one: Run,
    again: Sequence[Run],
    tolerance: Tolerance,
    notes: tuple[str, ...] = (),
) -> UnderMesh:
    """How a run differs from that of one device, of which ``again`` are the noisy repetitions."""
    if run.variables != one.variables:
        raise ModelError(_other_variables(run, one))
    firsts: list[Beyond] = []
    losses, differences = [], []
    for step, (loss, oracle_loss) in enumerate(zip(run.losses, one.losses, strict=False), start=1):
        noise = np.asarray(max(abs(other.losses[step - 1] - oracle_loss) for other in again))
        gap = _gap(np.asarray(loss), np.asarray(oracle_loss), abs(oracle_loss), noise, tolerance)
        losses.append(gap)
        firsts += [Beyond(step, "loss", "")] if gap.is_beyond else []
    for number in range(len(one.variables)):
        differences.append(_judge_variable(number, run, one, again, tolerance))
    firsts += [difference.first for difference in differences if difference.first is not None]
    order = ("initial value", "loss", "gradient", "value")
    first = min(firsts, key=lambda b: (b.step, order.index(b.quantity)), default=None)
    return UnderMesh(mesh, tuple(differences), run.losses, _largest(losses), first, notes)


def _other_variables(run: Run, one: Run) -> str:
    there, here = dict(one.variables), dict(run.variables)
    missing = [path for path in there if path not in here][:5]
    added = [path for path in here if path not in there][:5]
    return (
        f"build() made different variables under the mesh and on one device: missing {missing}, "
        f"added {added}. It must build the same model on every call."
    )


def _judge_variable(
    number: int, run: Run, one: Run, again: Sequence[Run], tolerance: Tolerance
) -> Difference:
    path, role = one.variables[number]
    firsts: list[Beyond] = []
    gradient = None
    mine, expected = run.gradients[number], one.gradients[number]
    if mine is not None and expected is not None:
        noise = _noise([rerun.gradients[number] for rerun in again], expected)
        gradient = _gap(mine, expected, _top(expected), noise, tolerance)
        firsts += [Beyond(1, "gradient", path)] if gradient.is_beyond else []
    gaps, is_noise = [], False
    for step, (values, oracle) in enumerate(zip(run.values, one.values, strict=True)):
        actual, expected, start = values[number], oracle[number], one.values[0][number]
        noise = np.zeros(())
        moved = _top(_wide(expected) - _wide(start)) if _is_float(expected) else 0.0
        if step:
            noise = _noise([rerun.values[step][number] for rerun in again], expected)
            is_noise = is_noise or bool(0 < moved < 10 * np.median(noise))
        ulps = _INITIAL_ULPS if step == 0 else 4.0
        gap = _gap(actual, expected, moved, noise, tolerance, ulps * _eps(expected))
        gaps.append(gap)
        if gap.is_beyond:
            firsts.append(Beyond(step, "value" if step else "initial value", path))
    first = min(firsts, key=lambda b: (b.step, b.quantity), default=None)
    return Difference(path, role, gradient, _largest(gaps), first, is_noise)


def _gap(
    actual: np.ndarray,
    expected: np.ndarray,
    scale: float,
    noise: np.ndarray,
    tolerance: Tolerance,
    ulps: float = 0.0,
) -> Gap:
    if actual.shape != expected.shape:
        return Gap(np.inf, np.inf, np.inf)
    if not expected.size:
        return Gap(0.0, 0.0, 0.0)
    if not _is_float(expected):
        unequal = float(np.any(actual != expected))
        return Gap(unequal, unequal, np.inf if unequal else 0.0)
    apart = np.abs(_wide(actual) - _wide(expected))
    # One device's noise may be zero here by chance: the median speaks for the whole variable.
    noisy = np.maximum(noise, np.median(noise))
    allowed = tolerance.rtol * scale + ulps * np.abs(expected).max() + _SLACK * noisy
    largest = apart.max()
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(apart == 0, 0.0, apart / allowed).max()
        relative = largest / np.float64(scale) if largest else 0.0
    return Gap(float(largest), float(relative), float(excess))


def _largest(gaps: Sequence[Gap]) -> Gap:
    """The largest of each figure; NaN, which nothing is near, is larger than all."""

    def largest(figures: list[float]) -> float:
        return max((np.inf if np.isnan(figure) else figure for figure in figures), default=0.0)

    return Gap(
        largest([gap.absolute for gap in gaps]),
        largest([gap.relative for gap in gaps]),
        largest([gap.excess for gap in gaps]),
    )


def _noise(others: Sequence[Any], expected: np.ndarray) -> np.ndarray:
    """How far one device's own repetitions are from it, element by element."""
    if not _is_float(expected):
        return np.zeros(())
    return np.max([np.abs(_wide(other) - _wide(expected)) for other in others], axis=0)


def _top(array: np.ndarray) -> float:
    return float(np.abs(array).max()) if array.size else 0.0


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(complex if array.dtype.kind == "c" else float)


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind not in "biuSU" and array.dtype.names is None


def _eps(array: np.ndarray) -> float:
    import jax.numpy as jnp

    return float(jnp.finfo(array.dtype).eps) if _is_float(array) else 0.0
