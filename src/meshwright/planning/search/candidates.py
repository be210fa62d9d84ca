"""Answers of the search: put simply, in names that say something."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .choices import Choices, Cost, Layouts
from .clique_tables import Tables
from .compact import Compact


class Candidate(NamedTuple):
    """An answer and what the model says of it."""

    layouts: Layouts
    cost: Cost


def plain(problem: Compact, tables: Tables, masks: Mapping[int, int], keep_axes: bool) -> Layouts:
    """The answer in names, without axes that nothing lies along and ZeRO over nothing."""
    axes, choices = tables.frame.setting.axes, tables.choices
    rules = tuple(
        (unit.family, tuple(name for bit, (name, _) in enumerate(axes) if mask >> bit & 1))
        for place, unit in enumerate(problem.units)
        if (mask := masks.get(place, 0))
    )
    batch = problem.batch
    if batch is None or not masks.get(batch, 0):
        choices = Choices(0, choices.accumulate, choices.remat)
    used = {axis for _, along in rules for axis in along}
    mesh_axes = axes if keep_axes else tuple(axis for axis in axes if axis[0] in used)
    return Layouts(mesh_axes, rules, choices)


def simplified(problem: Compact, layouts: Layouts) -> Iterator[Layouts]:
    """The same with axes merged that always lie together, and with those of the batch first."""
    lies = {name: [name in along for _, along in layouts.rules] for name, _ in layouts.axes}
    groups: dict[tuple[bool, ...], list[str]] = {}
    for name, along in lies.items():
        groups.setdefault(tuple(along), []).append(name)
    sizes = dict(layouts.axes)
    merged = tuple(
        (group[0], math.prod(sizes[name] for name in group)) for group in groups.values()
    )
    rules = tuple(
        (family, tuple(name for name, _ in merged if name in along))
        for family, along in layouts.rules
    )
    first = Layouts(merged, rules, layouts.choices)
    yield first
    rows = _along_batch(problem, first)
    ordered = tuple(sorted(merged, key=lambda axis: axis[0] not in rows))
    names = [name for name, _ in ordered]
    rules = tuple((family, tuple(sorted(along, key=names.index))) for family, along in rules)
    yield Layouts(ordered, rules, layouts.choices)


def in_words(problem: Compact, layouts: Layouts) -> Layouts:
    """Axes by what lies along them: ``batch`` for the batch's rows, ``model`` for the others."""
    rows = _along_batch(problem, layouts)
    counted = {"batch": 0, "model": 0}
    names = {}
    for axis, _ in layouts.axes:
        kind = "batch" if axis in rows else "model"
        counted[kind] += 1
        names[axis] = kind if counted[kind] == 1 else f"{kind}{counted[kind]}"
    axes = tuple((names[axis], size) for axis, size in layouts.axes) or (("batch", 1),)
    rules = tuple((family, tuple(names[a] for a in along)) for family, along in layouts.rules)
    return Layouts(axes, rules, layouts.choices)


def _along_batch(problem: Compact, layouts: Layouts) -> tuple[str, ...]:
    return () if problem.batch is None else layouts.of(problem.units[problem.batch].family)
