"""Rules of what reads or writes at places that are values: gathers, scatters, dynamic slices."""

from __future__ import annotations

from collections.abc import Iterable

from .factors import Dim, Dims
from .facts import Facts, Rule


def gather(f: Facts) -> list[Dims]:
    """Each device has some of the rows that are looked up: the results are summed over devices."""
    numbers = f.params["dimension_numbers"]
    batching = _pairs(numbers.start_indices_batching_dims, numbers.operand_batching_dims)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    table, places = f.ins[:2]
    f.summed += [table[i] for i in numbers.collapsed_slice_dims]
    f.whole.append(places[-1])
    windows = iter([i for i in range(len(table)) if i not in gone])
    rows = iter(range(len(places) - 1))
    out: list[Dim] = []
    for place, size in enumerate(f.out_shape()):
        if place in numbers.offset_dims:
            out.append(f.kept(0, next(windows), size))
            continue
        i = next(rows)
        if i in batching:
            f.join(places[i], 0, table[batching[i]])
        out.append(places[i])
    return f.distinct([tuple(out)])


def scatter(f: Facts) -> list[Dims]:
    """What is written to one place overwrites: all updates are needed everywhere."""
    f.whole += [*_written(f), f.ins[1][-1]]
    return [f.ins[0]]


def scatter_add(f: Facts) -> list[Dims]:
    """Each device adds its own updates; the results are summed over devices."""
    f.summed += _written(f)
    f.whole.append(f.ins[1][-1])
    return [f.ins[0]]


def _written(f: Facts) -> list[Dim]:
    """Joins the dims of updates with those that they are written to; gives the others."""
    numbers = f.params["dimension_numbers"]
    batching = _pairs(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims)
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    table, places, updates = f.ins
    windows = iter([i for i in range(len(table)) if i not in gone])
    rows = iter(range(len(places) - 1))
    others: list[Dim] = []
    for place, dim in enumerate(updates):
        if place in numbers.update_window_dims:
            i = next(windows)
            if f.shape(0)[i] == f.shape(2)[place]:
                f.join(table[i], 2, dim)
            else:
                f.whole += [table[i], dim]
            continue
        i = next(rows)
        f.join(dim, 1, places[i])
        if i in batching:
            f.join(table[batching[i]], 2, dim)
        else:
            others.append(dim)
    return others


def _pairs(rows: Iterable[int], dims: Iterable[int]) -> dict[int, int]:
    return dict(zip(rows, dims, strict=True))


def dynamic_slice(f: Facts) -> list[Dims]:
    return [tuple(f.kept(0, i, size) for i, size in enumerate(f.out_shape()))]


def dynamic_update_slice(f: Facts) -> list[Dims]:
    for i, (wanted, dim) in enumerate(zip(f.ins[0], f.ins[1], strict=True)):
        if f.shape(0)[i] == f.shape(1)[i]:
            f.join(wanted, 1, dim)
        else:
            f.whole += [wanted, dim]
    return [f.ins[0]]


RULES: dict[str, Rule] = {
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    **dict.fromkeys(["scatter", "scatter-mul", "scatter-min", "scatter-max"], scatter),
    **dict.fromkeys(["scatter_mul", "scatter_min", "scatter_max"], scatter),
    **dict.fromkeys(["scatter-add", "scatter_add"], scatter_add),
}
