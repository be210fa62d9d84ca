"""A function that does the same to the arrays of many blocks, done once to all of them stacked.

An optimizer's step treats every weight by itself, mostly: as many times the same equations as there
are blocks. Equations that read one block's arrays, and come again for every other block, are taken
once, mapped over the stack. What reads several blocks' arrays (a global norm) takes them out of the
stack one by one, which is cheap where it matters: what meets there are scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from ..jaxprs.signatures import signs_of

Member = tuple[str, str]  # which argument, and the path in it
Tag = tuple[int, int]  # a family, and which of its members
Places = tuple[str | None, ...]  # the paths of a stack, ``None`` where it is left empty


@dataclass(frozen=True)
class Families:
    """Rows of arrays that are stacked: a row has an array per block, in the order of the stack, and
    ``None`` in places that are left empty."""

    rows: tuple[tuple[Member | None, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many members each has."""
        return tuple(sum(member is not None for member in row) for row in self.rows)


def alike(
    function: Callable[..., Any], names: Sequence[str], shapes: Sequence[Any], families: Families
) -> Callable[..., Any]:
    """``function`` of dicts of arrays, as one over dicts with stacks in place of members.

    ``names`` are those of its arguments and ``shapes`` their arrays' shapes, by path. The result is
    called with the arguments by name, and for each argument and each result with the members of its
    stacks by path.
    """
    closed, results = jax.make_jaxpr(function, return_shape=True)(*shapes)
    closed = _compat.written_out(closed)
    invars = jax.tree.unflatten(jax.tree.structure(tuple(shapes)), closed.jaxpr.invars)
    member = {
        entry: (row, place)
        for row, members in enumerate(families.rows)
        for place, entry in enumerate(members)
        if entry is not None
    }
    tags: dict[Any, Tag] = {}
    for name, part in zip(names, invars, strict=True):
        tags |= {var: member[name, path] for path, var in part.items() if (name, path) in member}
    grouped = _Groups.of(closed, tags, families)
    outvars = jax.tree.unflatten(jax.tree.structure(results), closed.jaxpr.outvars)

    def run(
        values_by_part: Mapping[str, Mapping[str, Any]],
        stacked: Sequence[Mapping[str, Places]],
        places_by_part: Sequence[Mapping[str, Places]],
    ) -> tuple[dict[str, Any], ...]:
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        stacks: dict[int, Any] = {}
        for name, part, of in zip(names, invars, stacked, strict=True):
            for path, members in of.items():
                first = next(m for m in members if m is not None)
                stacks[member[name, first][0]] = values_by_part[name][path]
            values |= {
                var: values_by_part[name][p] for p, var in part.items() if (name, p) not in member
            }
        outcome = _Values(values, stacks, grouped)
        for number, eqn in enumerate(closed.jaxpr.eqns):
            outcome.take(number, eqn)
        return tuple(
            {
                **{
                    path: outcome.stack([None if m is None else part[m] for m in members])
                    for path, members in of.items()
                },
                **{
                    path: outcome.value(atom)
                    for path, atom in part.items()
                    if not any(path in members for members in of.values())
                },
            }
            for part, of in zip(outvars, places_by_part, strict=True)
        )

    return run


@dataclass(frozen=True, eq=False)
class _Groups:
    """Which equations are one for all blocks: of each its family of results, and its place."""

    tags: dict[Any, Tag]  # of variables
    group_of: dict[int, tuple[int, int]]  # equation -> its group and its place there

    @classmethod
    def of(cls, closed: Any, roots: Mapping[Any, Tag], families: Families) -> _Groups:
        """Those of a jaxpr; what does not come for every block is left alone."""
        eqns = closed.jaxpr.eqns
        signs, banned, ids = signs_of(eqns).tolist(), set[int](), dict[Any, int]()
        while True:
            tags, groups, full = _assigned(eqns, signs, roots, banned, ids, families.counts)
            partial = {key for key, of in groups.items() if len(of) < full[key]}
            if not partial:
                return cls(tags, {n: (g, p) for g, of in groups.items() for p, n in of.items()})
            banned |= partial


def _assigned(
    eqns: Sequence[Any],
    signs: Sequence[int],
    roots: Mapping[Any, Tag],
    banned: set[int],
    ids: dict[Any, int],
    counts: Sequence[int],
) -> tuple[dict[Any, Tag], dict[int, dict[int, int]], dict[int, int]]:
    """Tags of all variables, the equations of each group by place, but for banned groups, and how
    many there are of a group that comes for every block that has what it reads."""
    tags, first = dict(roots), len(counts)
    members, full = dict(enumerate(counts)), dict[int, int]()
    groups: dict[int, dict[int, int]] = {}
    times: Counter[Any] = Counter()
    same: dict[Any, Any] = {}  # a variable to the first one that is computed alike
    first_outvars: dict[Any, Any] = {}
    for number, eqn in enumerate(eqns):
        read = [_tag(atom, tags) for atom in eqn.invars]
        places = {tag[1] for tag in read if tag is not None}
        if not places and not eqn.effects:  # Keras takes powers of betas anew for every weight
            alone = signs[number], tuple(_key(atom, same) for atom in eqn.invars)
            same |= zip(eqn.outvars, first_outvars.setdefault(alone, eqn.outvars), strict=True)
        if len(places) != 1 or eqn.effects:
            continue
        (place,) = places
        atoms = tuple(
            ("family", tag[0]) if tag is not None else ("value", _key(atom, same))
            for tag, atom in zip(read, eqn.invars, strict=True)
        )
        again = times[signs[number], atoms, place]
        times[signs[number], atoms, place] += 1
        key = ids.setdefault((signs[number], atoms, again), len(ids))
        if key in banned:
            continue
        groups.setdefault(key, {})[place] = number
        full[key] = max(members[tag[0]] for tag in read if tag is not None)
        for result, var in enumerate(eqn.outvars):
            family = ids.setdefault(("result", key, result), len(ids))
            tags[var] = (first + family, place)
            members[first + family] = full[key]
    return tags, groups, full


def _tag(atom: Any, tags: Mapping[Any, Tag]) -> Tag | None:
    return None if hasattr(atom, "val") else tags.get(atom)


def _key(atom: Any, same: Mapping[Any, Any]) -> Any:
    return f"={atom.val!r}" if hasattr(atom, "val") else same.get(atom, atom)


class _Values:
    """The values so far: of single variables, and of families as stacks."""

    def __init__(self, values: dict[Any, Any], stacks: dict[int, Any], groups: _Groups) -> None:
        self._values, self._stacks, self._groups = values, stacks, groups
        self._done_groups: set[int] = set()

    def value(self, atom: Any) -> Any:
        """That of one variable, taken out of its stack if it is in one."""
        if hasattr(atom, "val"):
            return atom.val
        tag = self._groups.tags.get(atom)
        return self._values[atom] if tag is None else self._stacks[tag[0]][tag[1]]

    def stack(self, atoms: Sequence[Any]) -> Any:
        """The stack of these variables, with zeros in places that are left empty."""
        by_place = {place: atom for place, atom in enumerate(atoms) if atom is not None}
        tags = {place: _tag(atom, self._groups.tags) for place, atom in by_place.items()}
        families = {tag[0] for tag in tags.values() if tag is not None}
        in_order = [tag is not None and tag[1] == place for place, tag in tags.items()]
        if len(families) == 1 and all(in_order):
            return self._stacks[families.pop()]
        values = {place: self.value(atom) for place, atom in by_place.items()}
        empty = jnp.zeros_like(next(iter(values.values())))
        return jnp.stack([values.get(place, empty) for place in range(len(atoms))])

    def take(self, number: int, eqn: Any) -> None:
        """One equation; of a group all at once, where the first of them stands."""
        group = self._groups.group_of.get(number)
        if group is None:
            values = _compat.evaluate(eqn, [self.value(atom) for atom in eqn.invars])
            self._values.update(zip(eqn.outvars, values, strict=True))
            return
        if group[0] in self._done_groups:
            return
        self._done_groups.add(group[0])
        tags = [_tag(atom, self._groups.tags) for atom in eqn.invars]
        values = [
            self.value(atom) if tag is None else self._stacks[tag[0]]
            for tag, atom in zip(tags, eqn.invars, strict=True)
        ]
        axes = [None if tag is None else 0 for tag in tags]
        mapped = jax.vmap(lambda *operands: _compat.evaluate(eqn, list(operands)), in_axes=axes)
        for var, result in zip(eqn.outvars, mapped(*values), strict=True):
            self._stacks[self._groups.tags[var][0]] = result
