"""The rows of the table of primitives: functions that list the links of one equation each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .links import How, Link, Links, Place, Row, Shape, Shapes

# Dims that stay where they are


def elementwise(e: Shapes) -> Links:
    """Each element by itself; a dim of one element stands for all of the others' dim."""
    return in_place(tuple(map(len, e.ins)), tuple(map(len, e.outs)))


@functools.cache
def in_place(ins: tuple[int, ...], outs: tuple[int, ...]) -> tuple[Link, ...]:
    """The links of dims that stay at their place, by the ranks of operands and results."""
    rank = max(outs)
    alike = [operand for operand, own in enumerate(ins) if own == rank]
    others = (
        (operand, dim) for operand, own in enumerate(ins) if own != rank for dim in range(own)
    )
    return (
        *(
            Link(
                How.EACH,
                tuple((operand, dim) for operand in alike),
                tuple((result, dim) for result, own in enumerate(outs) if own == rank),
            )
            for dim in range(rank)
        ),
        *(Link(How.WHOLE, (place,)) for place in others),
    )


def itself(e: Shapes) -> Links:
    """Each result is the operand at its place."""
    for number, shape in enumerate(e.ins):
        yield from (_one_to_one((number, dim), (number, dim)) for dim in range(len(shape)))


def _one_to_one(before: Place, after: Place) -> Link:
    return Link(How.EACH, (before,), (after,))


def _in_place_but(e: Shapes, moved: Callable[[int], Any]) -> Links:
    """As elementwise, but for the dims along which something moves."""
    for dim, link in enumerate(elementwise(e)):
        stays = link.how is not How.EACH or not moved(dim)
        yield link if stays else link._replace(how=How.ALONG)


def along(parameter: str) -> Row:
    """Works along the dim, or dims, that a parameter names, the same ones in all operands."""

    def row(e: Shapes) -> Links:
        value = e.params[parameter]
        rank = len(e.out)
        dims = {dim % rank for dim in (value if isinstance(value, Sequence) else [value])}
        return _in_place_but(e, dims.__contains__)

    return row


def some_of_each(e: Shapes) -> Links:
    """Slices: dims of which the results have all stay."""
    return _in_place_but(e, lambda dim: any(out[dim] != e.ins[0][dim] for out in e.outs))


def split(e: Shapes) -> Links:
    for link in some_of_each(e):
        if link.how is How.EACH:
            yield link
        else:  # the pieces have nothing to do with each other
            yield from (Link(How.ALONG, link.ins, (place,)) for place in link.outs)


def dynamic_slice(e: Shapes) -> Links:
    """As a slice; the operands that say where it starts are numbers without dims."""
    return some_of_each(e._replace(ins=e.ins[:1]))


def top_k(e: Shapes) -> Links:
    return along("axis")(e._replace(ins=e.ins[:1]))


def fourier(e: Shapes) -> Links:
    first = len(e.out) - len(e.params["fft_lengths"])
    return _in_place_but(e, lambda dim: dim >= first)


def pad(e: Shapes) -> Links:
    how = e.params["padding_config"]
    return _in_place_but(e, lambda dim: tuple(how[dim]) != (0, 0, 0))


def tile(e: Shapes) -> Links:
    """One element is spread along its dim, as by a broadcast; more of them move."""
    reps = e.params["reps"]
    if len(reps) != len(e.ins[0]):
        yield from unknown(e)
        return
    spread = [dim for dim, size in enumerate(e.ins[0]) if size == 1 != reps[dim]]
    for dim, link in enumerate(_in_place_but(e, lambda dim: reps[dim] != 1)):
        if dim not in spread:
            yield link
    yield Link(How.FILL, (), tuple((0, dim) for dim in spread))


def by_hand(e: Shapes) -> Links:
    """What runs on pieces, and says by itself how they hang together."""
    return _in_place_but(e, lambda dim: True)


def window(e: Shapes) -> Links:
    """Pooling: dims that the window does not go over stay."""
    return _in_place_but(e, _windowed(e))


def window_and_scatter(e: Shapes) -> Links:
    """The gradient of pooling: each element of the small source goes to a place in its window."""
    moved = _windowed(e)
    for dim in range(len(e.out)):
        large, small = (1, dim), (0, dim)
        if moved(dim):
            yield Link(How.ALONG, (large,), ((0, dim),))
            yield Link(How.ALONG, (small,), ((0, dim),))
        else:
            yield Link(How.EACH, (large, small), ((0, dim),))


def _windowed(e: Shapes) -> Callable[[int], bool]:
    """Which dims have windows other than single elements, one after another."""
    steps = [e.params[name] for name in POOL_STEPS if e.params.get(name) is not None]
    padding = e.params["padding"]
    return lambda dim: any(step[dim] != 1 for step in steps) or tuple(padding[dim]) != (0, 0)


POOL_STEPS = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


def dynamic_update_slice(e: Shapes) -> Links:
    for dim, (size, new) in enumerate(zip(*e.ins[:2], strict=True)):
        if size == new:
            yield Link(How.EACH, ((0, dim), (1, dim)), ((0, dim),))
        else:
            yield from (Link(How.ALONG, ((operand, dim),), ((0, dim),)) for operand in (0, 1))


def batches(count: int) -> Row:
    """Works on the last dims of the first operand as a whole, once per index of the dims before."""

    def row(e: Shapes) -> Links:
        first = len(e.ins[0]) - count
        for dim in range(first):
            ins, outs = (
                tuple((n, dim) for n, _ in enumerate(shapes)) for shapes in (e.ins, e.outs)
            )
            yield Link(How.EACH, ins, outs)
        yield Link(How.ANY, _places(e.ins, first), _places(e.outs, first))

    return row


def _places(shapes: Sequence[Shape], first: int = 0) -> tuple[Place, ...]:
    return tuple((n, dim) for n, shape in enumerate(shapes) for dim in range(first, len(shape)))


# Dims that go, come, or change places


def counted(e: Shapes) -> Links:
    """An array without operands, whose values depend on the index alone."""
    yield Link(How.FILL, (), _places(e.outs))


def random_bits(e: Shapes) -> Links:
    """Random: the first dims are those of keys, and each device draws its own piece."""
    for dim in range(len(e.ins[0]) if e.ins else 0):
        in_all = all(shape[dim : dim + 1] == e.ins[0][dim : dim + 1] for shape in e.outs)
        outs = tuple((number, dim) for number, _ in enumerate(e.outs)) if in_all else ()
        yield Link(How.EACH if in_all else How.WHOLE, ((0, dim),), outs)


def bits(e: Shapes) -> Links:
    """Random, from one key whose words are all needed for each element."""
    yield Link(How.WHOLE, ((0, 0),))


def unknown(e: Shapes) -> Links:
    yield Link(How.ANY, _places(e.ins), _places(e.outs))


def reduces(how: How, parameter: str = "axes") -> Row:
    """The results lack the dims that a parameter names."""

    def row(e: Shapes) -> Links:
        dims = {dim % len(e.ins[0]) for dim in e.params[parameter]}
        operands = [operand for operand, shape in enumerate(e.ins) if shape]
        results = range(len(e.outs))
        after = 0
        for dim in range(len(e.ins[0])):
            ins = tuple([(operand, dim) for operand in operands])
            if dim in dims:
                yield Link(how, ins)
            else:
                yield Link(How.EACH, ins, tuple([(result, after) for result in results]))
                after += 1

    return row


sums, picks = reduces(How.SUM), reduces(How.WHOLE)


def squeeze(e: Shapes) -> Links:
    return (link for link in reduces(How.WHOLE, "dimensions")(e) if link.outs)


def transpose(e: Shapes) -> Links:
    return (_one_to_one((0, dim), (0, at)) for at, dim in enumerate(e.params["permutation"]))


def broadcast(e: Shapes) -> Links:
    new = set(range(len(e.out)))
    for dim, at in enumerate(e.params["broadcast_dimensions"]):
        if e.ins[0][dim] == e.out[at]:
            new.remove(at)
            yield _one_to_one((0, dim), (0, at))
    yield Link(How.FILL, (), tuple((0, at) for at in new))


def concatenate(e: Shapes) -> Links:
    at = e.params["dimension"]
    for link in _in_place_but(e, lambda dim: dim == at):
        if link.how is How.EACH:
            yield link
        else:  # each operand for itself
            yield from (Link(How.ALONG, (place,), link.outs) for place in link.ins)


def stack(e: Shapes) -> Links:
    at = e.params["axis"] % len(e.out)
    for dim in range(len(e.ins[0])):
        ins = tuple((operand, dim) for operand, _ in enumerate(e.ins))
        yield Link(How.EACH, ins, ((0, dim + (dim >= at)),))


def unstack(e: Shapes) -> Links:
    return picks(e._replace(params={"axes": [e.params["axis"]]}))


def bitcast(e: Shapes) -> Links:
    """Between types of different widths a last dim is added or removed."""
    shared = min(len(e.ins[0]), len(e.out))
    yield from (_one_to_one((0, dim), (0, dim)) for dim in range(shared))
    yield from (Link(How.WHOLE, ((0, dim),)) for dim in range(shared, len(e.ins[0])))


def reshape(e: Shapes) -> Links:
    if e.params.get("dimensions") is not None:
        yield from unknown(e)
        return
    for before, after in _runs(e.ins[0], e.out):
        how = How.EACH if len(before) == len(after) == 1 else How.MERGE
        yield Link(how, tuple((0, dim) for dim in before), tuple((0, dim) for dim in after))


def _runs(before: Shape, after: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of places, before and after, that hold the same elements.

    Dims of one element belong to none of them.
    """
    if math.prod(before) == 0:
        return
    left = [i for i, size in enumerate(before) if size > 1]
    right = [i for i, size in enumerate(after) if size > 1]
    while left:
        some, others = [left.pop(0)], [right.pop(0)]
        have, want = before[some[0]], after[others[0]]
        while have != want:
            if have < want:
                some.append(left.pop(0))
                have *= before[some[-1]]
            else:
                others.append(right.pop(0))
                want *= after[others[-1]]
        yield some, others


# Products


def dot_general(e: Shapes) -> Links:
    contracted, batch = e.params["dimension_numbers"]
    for at, (i, j) in enumerate(zip(*batch, strict=True)):
        yield Link(How.EACH, ((0, i), (1, j)), ((0, at),))
    for i, j in zip(*contracted, strict=True):
        yield Link(How.SUM, ((0, i), (1, j)))
    at = len(batch[0])
    for side, shape in enumerate(e.ins):
        for dim in range(len(shape)):
            if dim not in contracted[side] and dim not in batch[side]:
                yield _one_to_one((side, dim), (0, at))
                at += 1


def convolution(e: Shapes) -> Links:
    """Rows and channels as in a product; what a window goes over stays along its dim."""
    numbers, p = e.params["dimension_numbers"], e.params
    (rows, channels), (features, depth) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    for dim, groups in ((channels, p["feature_group_count"]), (rows, p["batch_group_count"])):
        if groups > 1:
            yield Link(How.GROUPS, ((0, dim), (1, features)), (), groups)
    yield Link(How.SUM, ((0, channels), (1, depth)))
    yield _one_to_one((0, rows), (0, numbers.out_spec[0]))
    yield _one_to_one((1, features), (0, numbers.out_spec[1]))
    for number, (row, tap, result) in enumerate(conv_places(numbers)):
        before, size, after = e.ins[0][row], e.ins[1][tap], e.out[result]
        steps = (p[name][number] for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
        plain = set(steps) == {1} and tuple(p["padding"][number]) == (0, 0)
        if plain and size == 1:
            yield _one_to_one((0, row), (0, result))
        elif size > after and before != after:  # as in the gradient of a kernel
            # Of equal sizes both may be split: XLA adds up what pieces with margins give.
            how = How.SUM if size == before else How.WHOLE
            yield Link(how, ((0, row), (1, tap)))
        else:
            yield Link(How.ALONG, ((0, row),), ((0, result),))
            yield Link(How.WHOLE, ((1, tap),))


def conv_places(numbers: Any) -> Iterator[tuple[int, int, int]]:
    """For each spatial dim of a convolution: where operand, kernel and result have it."""
    return zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)


# Places that are values


def gather(e: Shapes) -> Links:
    """Where a table is split, each device has some of the rows that are looked up."""
    numbers = e.params["dimension_numbers"]
    table, places = e.ins[:2]
    batching = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    yield from (Link(How.SUM, ((0, dim),)) for dim in numbers.collapsed_slice_dims)
    yield Link(How.WHOLE, ((1, len(places) - 1),))
    windowless = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = iter([dim for dim in range(len(table)) if dim not in windowless])
    rows = iter(range(len(places) - 1))
    for at, size in enumerate(e.out):
        if at in numbers.offset_dims:
            dim = next(windows)
            yield Link(How.EACH if table[dim] == size else How.ALONG, ((0, dim),), ((0, at),))
        else:
            row = next(rows)
            own = ((0, batching[row]),) if row in batching else ()
            yield Link(How.EACH, ((1, row), *own), ((0, at),))


def scatter(how: How) -> Row:
    """Updates are written at places; ``how`` says whether each device can write its own ones."""

    def row(e: Shapes) -> Links:
        numbers = e.params["dimension_numbers"]
        table, places, updates = e.ins
        batching = dict(
            zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
        )
        windowless = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        windows = iter([dim for dim in range(len(table)) if dim not in windowless])
        rows = iter(range(len(places) - 1))
        for dim, size in enumerate(updates):
            new = (2, dim)
            if dim in numbers.update_window_dims:
                own = next(windows)
                if table[own] == size:
                    yield Link(How.EACH, ((0, own), new), ((0, own),))
                else:
                    yield from (Link(How.ALONG, (place,), ((0, own),)) for place in ((0, own), new))
                continue
            at = next(rows)
            if at in batching:
                own = batching[at]
                yield Link(How.EACH, ((0, own), new, (1, at)), ((0, own),))
            else:
                yield Link(how, (new, (1, at)))
        yield Link(How.WHOLE, ((1, len(places) - 1),))
        yield from (Link(How.AT, ((0, dim),), ((0, dim),)) for dim in numbers.inserted_window_dims)

    return row
