"""How the dims of an equation's results follow from those of its operands: a row per primitive.

This is the only place that knows JAX's primitives. A row is a function that lists the *links* of
one equation: which dims of operands and results belong together, and :class:`How`. Links are what
Shardy's sharding rules call factors. Three engines read them and nothing else of a primitive:

- ``reach``: which axes of a mesh can reach which dims of every intermediate, for right gradients
  of split images;
- ``rows``: whether rows of a batch leave each other alone, so that it may be padded;
- ``joins``: which dims of a training step are one, and what splitting them costs, for the planner.

**How to add a primitive.** Write it into :data:`TABLE`, beside the function that describes it,
nearly always one that is there: ``elementwise``, ``along("axis")`` for work along the dim that a
parameter names, ``batches(2)`` for what takes the last two dims together, ``counted`` for what is
made of nothing. A new function yields a link per dim of the operands; a dim in no link is one of
size 1 that goes, and a dim of a result in no link is a new one. Where in doubt choose the weaker
``How``: ``ALONG`` costs communication in a plan and padding, a false ``EACH`` costs right numbers.
Then add a case to ``tests/jaxprs/primitives.py``; a test changes one index of each dim of each
operand there and compares what changes with the links. A primitive without a row is one link
``ANY``: every dim reaches every dim, rows mix, and a plan does it whole.
``tests/jaxprs/test_table.py`` lists those that are left so on purpose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

Shape = tuple[int, ...]
Place = tuple[int, int]  # which operand, or result, and which of its dims


class How(Enum):
    """What happens along the dims of a link.

    ``EACH``: an index of the results depends on the same index of the operands, and on no other.
    ``ALONG``: elements along the dim meet or move; it stays a dim of the results, of any size.
    ``SUM``: the operands' dim is gone, by a reduction that can be done piece by piece.
    ``WHOLE``: the operands' dim is gone, and all of it is needed at once.
    ``AT``: rows of a table that is written to at places that are values.
    ``MERGE``: dims of a reshape, slowest first, which hold the same elements before and after.
    ``GROUPS``: the slower factor of each dim, of which each index is by itself; links that come
    after it are about the rest of the first one.
    ``FILL``: dims of results alone; an index has the same elements whatever the size is.
    ``ANY``: any of these dims of operands may reach any of these dims of results.
    """

    EACH = 0
    ALONG = 1
    SUM = 2
    WHOLE = 3
    AT = 4
    MERGE = 5
    GROUPS = 6
    FILL = 7
    ANY = 8


class Link(NamedTuple):
    """Dims of operands and of results that belong together. ``size`` is that of ``GROUPS``."""

    how: How
    ins: tuple[Place, ...] = ()
    outs: tuple[Place, ...] = ()
    size: int = 0


class Shapes(NamedTuple):
    """What rows read of an equation: its parameters, the shapes of its operands and results."""

    params: Any
    ins: tuple[Shape, ...]
    outs: tuple[Shape, ...]

    @property
    def out(self) -> Shape:
        return self.outs[0]


Links = Iterable[Link]
Row = Callable[[Shapes], Links]


def links_of(eqn: Any) -> Sequence[Link]:
    """The links of an equation; one of ``ANY`` where its primitive has no row.

    >>> import jax, jax.numpy as jnp
    >>> product = jax.make_jaxpr(jnp.dot)(jnp.ones([2, 3]), jnp.ones([3, 4])).eqns[0]
    >>> [(link.how.name, link.ins, link.outs) for link in links_of(product)]
    [('SUM', ((0, 1), (1, 0)), ()), ('EACH', ((0, 0),), ((0, 0),)), ('EACH', ((1, 1),), ((0, 1),))]
    """
    params = eqn.params
    ins, outs = _shapes(eqn.invars), _shapes(eqn.outvars)
    row = TABLE.get(eqn.primitive.name, unknown)
    if row is elementwise:  # most equations
        return _in_place(tuple(map(len, ins)), tuple(map(len, outs)))
    try:
        key = row, ins, outs, tuple(params.values())
        if key not in _KNOWN:  # the same again in each block of a model
            if len(_KNOWN) > _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = tuple(row(Shapes(params, ins, outs)))
        return _KNOWN[key]
    except TypeError:  # a parameter that has no hash
        return tuple(row(Shapes(params, ins, outs)))


_KNOWN: dict[Any, tuple[Link, ...]] = {}
_MOST_KNOWN = 4096


def is_pointwise(eqn: Any) -> bool:
    """Whether each element is taken by itself, or all of them are reduced to one."""
    shapes = {*_shapes(eqn.invars), *_shapes(eqn.outvars)} - {()}
    rows = elementwise, itself, bitcast, sums, picks
    return TABLE.get(eqn.primitive.name) in rows and len(shapes) <= 1


def shape_of(atom: Any) -> Shape:
    """The shape of a variable or a literal; none for anything else."""
    return tuple(getattr(atom.aval, "shape", ()))


def _shapes(atoms: Sequence[Any]) -> tuple[Shape, ...]:
    return tuple([tuple(getattr(atom.aval, "shape", ())) for atom in atoms])


# Equations that hold jaxprs


def inner_jaxprs(eqn: Any) -> dict[str, list[Any]]:
    """The (closed) jaxprs that an equation runs on whole arrays, by parameter.

    Those that run on shards or blocks (``shard_map``, Pallas), and the scalar functions of
    reductions and scatters, are none of them.
    """
    name = eqn.primitive.name
    if name == "scan":
        return {"jaxpr": [eqn.params["jaxpr"]]}
    if name == "while":
        return {key: [eqn.params[key]] for key in ("cond_jaxpr", "body_jaxpr")}
    if name == "cond":
        return {"branches": list(eqn.params["branches"])}
    if name in TABLE or name in OUTSIDE:
        return {}
    for key in ("jaxpr", "call_jaxpr"):
        called = eqn.params.get(key)
        if called is not None and _fits_call(opened(called), eqn):
            return {key: [called]}
    return {}


def opened(jaxpr: Any) -> Any:
    """The open jaxpr of a closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _fits_call(jaxpr: Any, eqn: Any) -> bool:
    return (
        hasattr(jaxpr, "eqns")
        and _shapes(jaxpr.invars) == _shapes(eqn.invars)
        and _shapes(jaxpr.outvars) == _shapes(eqn.outvars)
    )


# Dims that stay where they are


def elementwise(e: Shapes) -> Links:
    """Each element by itself; a dim of one element stands for all of the others' dim."""
    return _in_place(tuple(map(len, e.ins)), tuple(map(len, e.outs)))


@functools.cache
def _in_place(ins: tuple[int, ...], outs: tuple[int, ...]) -> tuple[Link, ...]:
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
        yield from (_each((number, dim), (number, dim)) for dim in range(len(shape)))


def _each(before: Place, after: Place) -> Link:
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
    """As a slice, which begins with the first element where it is of all; where is a number."""
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
    if len(e.params["reps"]) != len(e.ins[0]):
        return unknown(e)
    return _in_place_but(e, lambda dim: e.params["reps"][dim] != 1)


def by_hand(e: Shapes) -> Links:
    """What runs on pieces, and says by itself how they hang together."""
    return _in_place_but(e, lambda dim: True)


def window(e: Shapes) -> Links:
    """Pooling: dims that the window does not go over stay."""
    return _in_place_but(e, _windowed(e))


def window_and_scatter(e: Shapes) -> Links:
    """The gradient of pooling: a source, small, goes where the windows of an operand tell."""
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
    steps = [e.params[name] for name in _STEPS if e.params.get(name) is not None]
    padding = e.params["padding"]
    return lambda dim: any(step[dim] != 1 for step in steps) or tuple(padding[dim]) != (0, 0)


_STEPS = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


def dynamic_update_slice(e: Shapes) -> Links:
    for dim, (size, new) in enumerate(zip(*e.ins[:2], strict=True)):
        if size == new:
            yield Link(How.EACH, ((0, dim), (1, dim)), ((0, dim),))
        else:
            yield from (Link(How.ALONG, ((operand, dim),), ((0, dim),)) for operand in (0, 1))


def batches(count: int) -> Row:
    """Takes the last dims of the first operand together, for each of those before by itself."""

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
    """Made from nothing, and counted from the first index on."""
    yield Link(How.FILL, (), _places(e.outs))


def drawn(e: Shapes) -> Links:
    """Random: the first dims are those of keys, and each device draws its own piece."""
    for dim in range(len(e.ins[0]) if e.ins else 0):
        kept = all(shape[dim : dim + 1] == e.ins[0][dim : dim + 1] for shape in e.outs)
        outs = tuple((number, dim) for number, _ in enumerate(e.outs)) if kept else ()
        yield Link(How.EACH if kept else How.WHOLE, ((0, dim),), outs)


def bits(e: Shapes) -> Links:
    """Random, from one key whose words are all needed for each element."""
    yield Link(How.WHOLE, ((0, 0),))


def unknown(e: Shapes) -> Links:
    yield Link(How.ANY, _places(e.ins), _places(e.outs))


def reduces(how: How, parameter: str = "axes") -> Row:
    """The dims that a parameter names are gone."""

    def row(e: Shapes) -> Links:
        gone = {dim % len(e.ins[0]) for dim in e.params[parameter]}
        operands = [operand for operand, shape in enumerate(e.ins) if shape]
        results = range(len(e.outs))
        after = 0
        for dim in range(len(e.ins[0])):
            ins = tuple([(operand, dim) for operand in operands])
            if dim in gone:
                yield Link(how, ins)
            else:
                yield Link(How.EACH, ins, tuple([(result, after) for result in results]))
                after += 1

    return row


sums, picks = reduces(How.SUM), reduces(How.WHOLE)


def squeeze(e: Shapes) -> Links:
    return (link for link in reduces(How.WHOLE, "dimensions")(e) if link.outs)


def transpose(e: Shapes) -> Links:
    return (_each((0, dim), (0, at)) for at, dim in enumerate(e.params["permutation"]))


def broadcast(e: Shapes) -> Links:
    new = set(range(len(e.out)))
    for dim, at in enumerate(e.params["broadcast_dimensions"]):
        if e.ins[0][dim] == e.out[at]:
            new.remove(at)
            yield _each((0, dim), (0, at))
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
    """To numbers of another width the last dim is made, or used up."""
    kept = min(len(e.ins[0]), len(e.out))
    yield from (_each((0, dim), (0, dim)) for dim in range(kept))
    yield from (Link(How.WHOLE, ((0, dim),)) for dim in range(kept, len(e.ins[0])))


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
                yield _each((side, dim), (0, at))
                at += 1


def convolution(e: Shapes) -> Links:
    """Rows and channels as in a product; what a window goes over stays along its dim."""
    numbers, p = e.params["dimension_numbers"], e.params
    (rows, channels), (features, depth) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    for dim, groups in ((channels, p["feature_group_count"]), (rows, p["batch_group_count"])):
        if groups > 1:
            yield Link(How.GROUPS, ((0, dim), (1, features)), (), groups)
    yield Link(How.SUM, ((0, channels), (1, depth)))
    yield _each((0, rows), (0, numbers.out_spec[0]))
    yield _each((1, features), (0, numbers.out_spec[1]))
    for number, (row, tap, result) in enumerate(conv_places(numbers)):
        before, size, after = e.ins[0][row], e.ins[1][tap], e.out[result]
        steps = (p[name][number] for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
        plain = set(steps) == {1} and tuple(p["padding"][number]) == (0, 0)
        if plain and size == 1:
            yield _each((0, row), (0, result))
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
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = iter([dim for dim in range(len(table)) if dim not in gone])
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
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        windows = iter([dim for dim in range(len(table)) if dim not in gone])
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


_ROWS: tuple[tuple[Row, str], ...] = (
    (
        elementwise,
        """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
        clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv
        erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite
        layout_constraint le le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne neg
        nextafter not or pbroadcast polygamma population_count pow psum psum_invariant pvary
        random_clone random_fold_in random_seed real reduce_precision
        regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint shift_left
        shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
        tanh threefry2x32 xor zeta
        """,
    ),
    (itself, "optimization_barrier device_put"),
    (counted, "iota"),
    (
        drawn,
        """
        empty empty2 random_bits random_split random_unwrap random_wrap rng_uniform
        """,
    ),
    (bits, "rng_bit_generator"),
    # along dims
    (along("axis"), "cumsum cumprod cummax cummin cumlogsumexp"),
    (along("dimensions"), "rev"),
    (along("dimension"), "sort"),
    (top_k, "top_k"),
    (fourier, "fft"),
    (pad, "pad"),
    (tile, "tile"),
    (some_of_each, "slice"),
    (split, "split"),
    (dynamic_slice, "dynamic_slice"),
    (dynamic_update_slice, "dynamic_update_slice"),
    (concatenate, "concatenate"),
    (
        window,
        "reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add",
    ),
    (window_and_scatter, "select_and_scatter_add"),
    (by_hand, "shard_map"),
    # other shapes
    (bitcast, "bitcast_convert_type"),
    (broadcast, "broadcast_in_dim"),
    (reshape, "reshape"),
    (squeeze, "squeeze"),
    (stack, "stack"),
    (transpose, "transpose"),
    (unstack, "unstack"),
    # reductions and products
    (sums, "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"),
    (picks, "argmax argmin"),
    (reduces(How.WHOLE, "dimensions"), "reduce"),
    (dot_general, "dot_general"),
    (convolution, "conv_general_dilated"),
    # places that are values
    (gather, "gather"),
    (scatter(How.WHOLE), "scatter scatter-mul scatter-min scatter-max"),
    (scatter(How.SUM), "scatter-add scatter-sub"),
    # linear algebra
    (
        batches(2),
        "cholesky eig eigh householder_product lu qr schur svd triangular_solve",
    ),
    (batches(1), "lu_pivots_to_permutation tridiagonal_solve"),
)
TABLE: dict[str, Row] = {name: row for row, names in _ROWS for name in names.split()}

# These call Python on the host.
CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))
# These act on devices or on the host: they may do another thing each time, or with each piece.
OUTSIDE = CALLBACKS | frozenset(
    ["shard_map", "pallas_call", "core_map", "mpmd_map", "run_state", "run_scoped", "ffi_call"]
)
