"""A function of every stage's arrays, computed by each stage for its own.

An optimizer treats every weight by itself, mostly. Equations that read one stage's arrays are that
stage's; where arrays of several stages meet (a global norm), each stage sends what is read there,
mostly scalars, and the rest is computed everywhere alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays.by_hand import over_axes
from ..jaxprs.slices import needed_behind, variables
from .evaluating import evaluated

Var = Any


class Piece(NamedTuple):
    """One array in a packed row: the stage whose row it is, its first element, and its dims."""

    path: str
    stage: int
    offset: int
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        size = 1
        for dim in self.dims:
            size *= dim
        return size


def packed_row(pieces: Sequence[Piece], values: Mapping[str, Any], length: int, dtype: Any) -> Any:
    """Arrays of one stage, flat and each in its place, with zeros elsewhere."""
    parts, end = [], 0
    for piece in pieces:
        parts += [jnp.zeros([piece.offset - end], dtype)]
        parts += [jnp.ravel(values[piece.path]).astype(dtype)]
        end = piece.offset + piece.size
    return jnp.concatenate([*parts, jnp.zeros([length - end], dtype)])


def from_row(pieces: Sequence[Piece], row: Any) -> dict[str, Any]:
    """The arrays of one stage out of its row."""
    return {
        piece.path: row[piece.offset : piece.offset + piece.size].reshape(piece.dims)
        for piece in pieces
    }


@dataclass(frozen=True, eq=False)
class ByStage:
    """Equations of ``function(*dicts) -> dicts``, dealt to stages.

    ``inputs`` are the packs of each argument by path, and ``outputs`` those of each result: a pack
    is the pieces of all stages. ``axis`` of ``mesh`` is the stages'.
    """

    function: Any
    shapes: Sequence[Mapping[str, Any]]
    inputs: Sequence[Mapping[str, tuple[Piece, ...]]]
    outputs: Sequence[Mapping[str, tuple[Piece, ...]]]
    stages: int
    axis: str
    mesh: Any

    def __call__(self, *parts: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Of dicts with packs, shaped ``(stages, length)``, in place of what is in them."""
        closed, results = jax.make_jaxpr(self.function, return_shape=True)(*self.shapes)
        jaxpr = closed.jaxpr
        invars = jax.tree.unflatten(jax.tree.structure(tuple(self.shapes)), jaxpr.invars)
        outvars = jax.tree.unflatten(jax.tree.structure(results), jaxpr.outvars)
        owner: dict[Var, int] = {}
        shared: dict[Var, Any] = {}
        for values, arguments, packs in zip(parts, invars, self.inputs, strict=True):
            pieces = {piece.path: piece for pack in packs.values() for piece in pack}
            for path, var in arguments.items():
                if path in pieces:
                    owner[var] = pieces[path].stage
                else:
                    shared[var] = values[path]
        rows = [
            {path: values[path] for path in packs}
            for values, packs in zip(parts, self.inputs, strict=True)
        ]
        work = _Dealt(self, closed, invars, owner, shared, rows)
        packed = [{p.path for pack in of.values() for p in pack} for of in self.outputs]
        rest = [
            {path: atom for path, atom in part.items() if path not in within}
            for part, within in zip(outvars, packed, strict=True)
        ]
        work.meet([atom for part in rest for atom in part.values()])
        lengths = [
            {path: (given_dims(parts, path), dtype_of(parts, path)) for path in packs}
            for packs in self.outputs
        ]
        new = work.rows(outvars, lengths)
        return tuple(
            packs | {path: work.value(atom) for path, atom in part.items()}
            for part, packs in zip(rest, new, strict=True)
        )


def given_dims(parts: Sequence[Mapping[str, Any]], path: str) -> int:
    """Length of the rows of a pack."""
    return next(part[path].shape[1] for part in parts if path in part)


def dtype_of(parts: Sequence[Mapping[str, Any]], path: str) -> Any:
    """Type of the elements of a pack."""
    return next(part[path].dtype for part in parts if path in part)


class _Dealt:
    """The equations by stage, and the values so far that all stages have."""

    def __init__(
        self,
        by: ByStage,
        closed: Any,
        invars: Any,
        owner: dict[Var, int],
        shared: dict[Var, Any],
        rows: list[dict[str, Any]],
    ) -> None:
        self._by, self._closed, self._invars, self._rows = by, closed, invars, rows
        self._eqns, self._shared = closed.jaxpr.eqns, shared
        self._shared |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._maker = {v: n for n, eqn in enumerate(self._eqns) for v in eqn.outvars}
        self._owner = owner
        self._sent: list[list[Var]] = []  # by how many meetings are needed before
        self._level: dict[Var, int] = {}
        self._common: list[list[int]] = [[]]
        for number, eqn in enumerate(self._eqns):
            self._deal(number, eqn)

    def _deal(self, number: int, eqn: Any) -> None:
        read = variables(eqn.invars)
        stages = {self._owner[v] for v in read if v in self._owner}
        before = [self._level.get(v, 0) for v in read]
        if len(stages) == 1:
            (stage,) = stages
            self._owner |= dict.fromkeys(eqn.outvars, stage)
            self._level |= dict.fromkeys(eqn.outvars, max(before, default=0))
            return
        level = max(
            (at + (v in self._owner) for at, v in zip(before, read, strict=True)), default=0
        )
        for var in read:
            if var in self._owner:
                self._send(var)
        self._level |= dict.fromkeys(eqn.outvars, level)
        while len(self._common) <= level:
            self._common.append([])
        self._common[level].append(number)

    def _send(self, var: Var) -> None:
        level = self._level.get(var, 0)
        while len(self._sent) <= level:
            self._sent.append([])
        if var not in self._sent[level]:
            self._sent[level].append(var)

    def meet(self, outputs: Sequence[Any]) -> None:
        """Compute what all stages have alike, one meeting after the other, with what is wanted."""
        for var in variables(outputs):
            if var in self._owner:
                self._send(var)
        for level in range(max(len(self._common), len(self._sent) + 1)):
            if 0 < level <= len(self._sent) and (sent := self._sent[level - 1]):

                def branch(stage: int, rows: Any, shared: Any, sent: Any = sent) -> list[Any]:
                    own = [v for v in sent if self._owner[v] == stage]
                    values = dict(zip(own, self._own(stage, own, rows, shared), strict=True))
                    empty = jax.numpy.zeros
                    return [
                        values[v] if v in values else empty(v.aval.shape, v.aval.dtype)
                        for v in sent
                    ]

                self._shared |= zip(sent, self._by_stage(branch, sums=True), strict=True)
            for number in self._common[level] if level < len(self._common) else ():
                eqn = self._eqns[number]
                results = evaluated(self._closed, [eqn], eqn.outvars, self._shared)
                self._shared |= zip(eqn.outvars, results, strict=True)

    def value(self, atom: Any) -> Any:
        """One that all stages have."""
        return atom.val if hasattr(atom, "val") else self._shared[atom]

    def rows(self, outvars: Any, lengths: Any) -> list[dict[str, Any]]:
        """The packs of results."""

        def branch(stage: int, rows: Any, shared: Any) -> list[dict[str, Any]]:
            result = []
            for part, packs, of in zip(outvars, self._by.outputs, lengths, strict=True):
                row = {}
                for path, pack in packs.items():
                    own = [piece for piece in pack if piece.stage == stage]
                    values = self._own(stage, [part[p.path] for p in own], rows, shared)
                    by_path = {p.path: v for p, v in zip(own, values, strict=True)}
                    row[path] = packed_row(own, by_path, *of[path])[None]
                result.append(row)
            return result

        return self._by_stage(branch, sums=False)

    def _by_stage(self, branch: Any, sums: bool) -> Any:
        """What each stage computes: the sum over stages, or their rows one below the other."""
        read = {v for eqn in self._eqns for v in variables(eqn.invars)}
        shared = {v: x for v, x in self._shared.items() if v in read}
        names, spec = list(shared), jax.sharding.PartitionSpec
        stages, axis = self._by.stages, self._by.axis

        def run(number: Any, rows: Any, values: list[Any]) -> Any:
            shared_values = dict(zip(names, values, strict=True))
            branches = [lambda s=s: branch(s, rows, shared_values) for s in range(stages)]
            result = jax.lax.switch(number[0], branches)
            return jax.tree.map(lambda v: summed(v, axis), result) if sums else result

        return over_axes(
            run,
            mesh=self._by.mesh,
            in_specs=(spec(axis), spec(axis), spec()),
            out_specs=spec() if sums else spec(axis),
            axis_names={axis},
        )(jnp.arange(stages), self._rows, list(shared.values()))

    def _own(self, stage: int, outputs: list[Any], rows: Any, shared: dict[Var, Any]) -> list[Any]:
        own_values = dict(shared)
        for values, arguments, packs in zip(rows, self._invars, self._by.inputs, strict=True):
            for path, pack in packs.items():
                own = [piece for piece in pack if piece.stage == stage]
                members = from_row(own, values[path][0])
                own_values |= {arguments[at]: value for at, value in members.items()}
        numbers = needed_behind(self._eqns, self._maker, outputs, own_values)
        return evaluated(self._closed, [self._eqns[n] for n in numbers], outputs, own_values)


def summed(value: Any, axis: str) -> Any:
    """The sum over the devices of an axis that is taken by hand.

    XLA's CPU compiler ends the process at sums of 16-bit floats there, so it gets 32 bits.
    """
    if value.dtype == bool:
        return jax.lax.psum(value.astype("int32"), axis) > 0
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize > 2:
        return jax.lax.psum(value, axis)
    return jax.lax.platform_dependent(
        value,
        cpu=lambda value: jax.lax.psum(value.astype("float32"), axis).astype(value.dtype),
        default=lambda value: jax.lax.psum(value, axis),
    )
