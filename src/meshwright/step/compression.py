"""Sums of gradients of which only a part travels, and what is left is added to the next step's.

``PowerSGD`` sends two thin factors of every matrix (Vogels et al., 2019), ``TopK`` the largest
values (Lin et al., 2018). Error feedback (Seide et al., 2014; Karimireddy et al., 2019): each
device keeps what it has not sent yet in a slot of its own, so that nothing is lost for good. Only
the sum of what the devices keep matters, and that is what goes on under another mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelError
from ..layouts.layout import Layout
from ..layouts.params import ParamInfo
from ..layouts.placement import Placement
from ..program import Arrays, Program, TrainState
from .flat import cut, joined

UNSENT = "unsent_gradients"  # the slot: a row for each device, of all parameters one behind another


@dataclass(frozen=True)
class TopK:
    """Send only a ``share`` of the values, above 0 and at most 1: the largest by magnitude.

    With parameter servers it is a share of each gradient, and ``feedback=False`` drops the rest
    instead of keeping it for the next step. Raises :class:`~meshwright.ModelError` for another
    share. (Lin et al. 2018)

    >>> TopK(0.01)
    TopK(share=0.01, feedback=True)
    """

    share: float
    feedback: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ModelError(f"TopK(share) must be > 0 and <= 1; received {self.share!r}.")


@dataclass(frozen=True)
class PowerSGD:
    """Send every matrix as the product of two of this ``rank``; smaller arrays go as they are.

    A kernel is a matrix of its outputs by everything else. Raises :class:`~meshwright.ModelError`
    for a rank below 1. (Vogels et al. 2019)

    >>> PowerSGD(rank=4)
    PowerSGD(rank=4)
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ModelError(f"PowerSGD(rank) must be 1 or more; received {self.rank!r}.")


Compress = TopK | PowerSGD


def with_unsent(program: Program, placement: Placement, how: Compress) -> Program:
    """The program with a slot for what each device has not sent yet, laid out over the devices."""
    layout = rows_layout(placement)
    there = [replace(i, asked=layout) for i in program.slots if i.path.endswith(UNSENT)]
    others = tuple(info for info in program.slots if not info.path.endswith(UNSENT))
    if there:
        return replace(program, slots=(*others, *there))
    rows = first_rows({info.path: info.dims for info in program.params}, placement, how)

    def initial() -> TrainState:
        import jax.numpy as jnp

        first = program.initial()
        return first._replace(slots={**first.slots, UNSENT: jnp.asarray(rows)})

    slot = ParamInfo(UNSENT, (UNSENT,), rows.shape, "float32", 4, "slot", asked=layout)
    return replace(program, slots=(*others, slot), initial=initial)


def rows_layout(placement: Placement) -> Layout:
    """The layout of the slot: a row on each device."""
    return Layout([placement.batch_axes or None, None], placement.mesh).unbound()


def first_rows(dims: Mapping[str, tuple[int, ...]], placement: Placement, how: Compress) -> Any:
    """The slot to begin with, for parameters of these dims by path."""
    import numpy as np

    return np.tile(_Form.of(dims, how).first(), (placement.batch_shards, 1))


def respread(rows: Any, count: int) -> Any:
    """What other devices had not sent yet, in equal shares for ``count`` devices.

    >>> import numpy as np
    >>> respread(np.array([[1.0, 2.0], [3.0, 4.0]]), 4).sum(0).tolist()
    [4.0, 6.0]
    """
    import numpy as np

    return np.tile(rows.sum(0) / count, (count, 1)).astype(rows.dtype)


def loss_scale(slots: Arrays) -> Any:
    """What Keras' LossScaleOptimizer multiplies the loss by, and so every gradient; else 1."""
    return next((value for path, value in slots.items() if path.endswith("/dynamic_scale")), 1.0)


def sum_compressed(
    parts: Arrays, params: Arrays, unsent: Any, mesh: Any, axes: tuple[str, ...], how: Compress
) -> tuple[Arrays, Any]:
    """The sums over devices of gradients in parts, and what is left; see ``summing.sum_flat``.

    ``unsent`` has a row for each device, and stays where no gradient is in parts.
    """
    if not parts:
        return {}, unsent
    import jax

    from ..arrays.by_hand import over_axes

    spec, form = (
        jax.sharding.PartitionSpec,
        _Form.of({path: value.shape for path, value in params.items()}, how),
    )
    paths = list(parts)

    def summed(rows: Any, *pieces: Any) -> tuple[list[Any], Any]:
        mine = dict(zip(paths, (piece[0].astype("float32") for piece in pieces), strict=True))
        own = {
            path: mine[path] + unsent for path, unsent in form.cut(rows[0]).items() if path in mine
        }
        if isinstance(how, TopK):
            sums, unsent = _largest(own, axes, how)
            factors = {}
        else:
            sums, unsent, factors = _factored(own, form.factors(rows[0]), axes)
        row = form.joined(unsent, factors, rows[0])
        return [sums[path] for path in paths], _kept(row, rows[0], sums)[None]

    with jax.named_scope("gradients"):
        sums, unsent = over_axes(
            summed,
            mesh=mesh,
            in_specs=(spec(axes), *(spec(axes),) * len(paths)),
            out_specs=([spec()] * len(paths), spec(axes)),
            axis_names=axes,
        )(unsent, *parts.values())
    return dict(zip(paths, sums, strict=True)), unsent


def _kept(row: Any, before: Any, sums: Arrays) -> Any:
    """The new row; the one before where a sum is not finite, or that would stay in it for ever.

    Optimizers that scale the loss, or skip what is not finite, go on after such a step.
    """
    import jax.numpy as jnp

    is_finite = jnp.all(jnp.asarray([jnp.all(jnp.isfinite(total)) for total in sums.values()]))
    return jnp.where(is_finite, row, before)


def _largest(own: Arrays, axes: tuple[str, ...], how: TopK) -> tuple[Arrays, Arrays]:
    """The sums of the largest values of each device, and the others."""
    import jax
    import jax.numpy as jnp

    flat = joined(own.values())
    _, places = jax.lax.top_k(jnp.abs(flat), max(1, round(how.share * flat.size)))
    all_places = jax.lax.all_gather(places, axes).reshape(-1)
    all_values = jax.lax.all_gather(flat[places], axes).reshape(-1)
    total = jnp.zeros_like(flat).at[all_places].add(all_values)
    unsent = flat.at[places].set(0) if how.feedback else jnp.zeros_like(flat)
    return _like(total, own), _like(unsent, own)


def _factored(own: Arrays, factors: Arrays, axes: tuple[str, ...]) -> tuple[Arrays, Arrays, Arrays]:
    """The sums of matrices through thin factors, what these leave out, and the second factors."""
    import jax.numpy as jnp

    thin = {path: own[path] for path in own if path in factors}
    matrices = {path: value.reshape(-1, value.shape[-1]) for path, value in thin.items()}
    whole = {path: value for path, value in own.items() if path not in thin}
    firsts = {path: matrix @ factors[path] for path, matrix in matrices.items()}
    first_sums = _summed({**whole, **{("first", p): v for p, v in firsts.items()}}, axes)
    bases = {path: jnp.linalg.qr(first_sums["first", path])[0] for path in matrices}
    seconds = {path: matrix.T @ bases[path] for path, matrix in matrices.items()}
    second_sums = _summed(seconds, axes)
    sums = {path: first_sums[path] for path in whole}
    unsent = {path: jnp.zeros_like(value) for path, value in whole.items()}
    for path, value in thin.items():
        sums[path] = (bases[path] @ second_sums[path].T).reshape(value.shape)
        unsent[path] = value - (bases[path] @ seconds[path].T).reshape(value.shape)
    # Of a matrix of zeros nothing would be left to begin the next step with.
    power_state = {
        path: jnp.where(jnp.any(total != 0, 0), total, factors[path])
        for path, total in second_sums.items()
    }
    return sums, unsent, power_state


def _summed(values: Mapping[Any, Any], axes: tuple[str, ...]) -> dict[Any, Any]:
    """The sums over devices, made as one vector."""
    import jax

    return _like(jax.lax.psum(joined(values.values()), axes), values) if values else {}


def _like(flat: Any, values: Mapping[Any, Any]) -> dict[Any, Any]:
    """A vector as arrays of these names and shapes."""
    return dict(zip(values, cut(flat, (value.shape for value in values.values())), strict=True))


@dataclass(frozen=True)
class _Form:
    """Where in a device's row each parameter lies, and behind them the factors of ``PowerSGD``."""

    dims: tuple[tuple[str, tuple[int, ...]], ...]
    rank: int | None

    @classmethod
    def of(cls, dims: Mapping[str, tuple[int, ...]], how: Compress) -> _Form:
        return cls(tuple(sorted(dims.items())), how.rank if isinstance(how, PowerSGD) else None)

    @functools.cached_property
    def thin(self) -> dict[str, tuple[int, int]]:
        """The dims of the second factor of every matrix that travels as two."""
        rank, thin = self.rank, {}
        for path, dims in self.dims:
            if rank is None or len(dims) < 2:
                continue
            rows, columns = math.prod(dims[:-1]), dims[-1]
            if rank * (rows + columns) < rows * columns:
                thin[path] = (columns, rank)
        return thin

    @property
    def size(self) -> int:
        """The elements of all parameters."""
        return sum(math.prod(dims) for _, dims in self.dims)

    @property
    def length(self) -> int:
        """The elements of a row."""
        return self.size + sum(map(math.prod, self.thin.values()))

    def first(self) -> Any:
        """The row to begin with: nothing is left, and factors are drawn."""
        import numpy as np

        draw = np.random.default_rng(0)
        return np.concatenate(
            [np.zeros(self.size, "f"), draw.normal(size=self.length - self.size).astype("f")]
        )

    def cut(self, row: Any) -> Arrays:
        """What is left of each parameter."""
        return _named(row, dict(self.dims))

    def factors(self, row: Any) -> Arrays:
        """The second factors."""
        return _named(row[self.size :], self.thin)

    def joined(self, unsent: Arrays, factors: Arrays, before: Any) -> Any:
        """A row again; parts of neither kind are as they were ``before``."""
        parts = {**self.cut(before), **unsent}
        behind = {**self.factors(before), **factors}
        ordered = [parts[path] for path, _ in self.dims] + [behind[path] for path in self.thin]
        return joined(ordered)


def _named(row: Any, dims: Mapping[str, tuple[int, ...]]) -> Arrays:
    """The beginning of a vector as arrays of these names and dims."""
    return dict(zip(dims, cut(row, dims.values()), strict=True))
