"""What each primitive does to rows that are the beginning of more rows; see ``prefix.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from .twins import Dim, Pair, shape_of


def _elementwise(eqn: Pair) -> None:
    eqn.same(*(name for name in eqn.params if "sharding" not in name))
    cut = {dim for dim in eqn.dims if dim is not None}
    eqn.need(len(cut) <= 1, "of rows with other dims")
    dim = next(iter(cut), None)
    if dim is not None:
        for operand, own in enumerate(eqn.dims):
            shape = eqn.shape(operand)
            wide = len(shape) == len(eqn.out_shape)
            eqn.need(not shape or wide, "of operands of different rank")
            rows = eqn.out_shape[dim] if own is not None else 1
            eqn.need(not shape or shape[dim] == rows, "repeats rows")
    eqn.need_outs(dim)


def _broadcast(eqn: Pair) -> None:
    places = eqn.params["broadcast_dimensions"]
    eqn.same("broadcast_dimensions")
    (out,), dim = eqn.outs, eqn.one()
    if dim is None:  # the same value for each new row
        repeated = out not in places or eqn.shape(0)[places.index(out)] == 1
        eqn.need(out is None or repeated, "moves the rows elsewhere")
        return
    eqn.need(eqn.shape(0)[dim] == eqn.out_shape[places[dim]], "repeats rows")
    eqn.need_outs(places[dim])


def _iota(eqn: Pair) -> None:
    eqn.same("dimension", "dtype")


def _reshape(eqn: Pair) -> None:
    dim, (out,) = eqn.one(), eqn.outs
    eqn.need(eqn.params.get("dimensions") is None, "with an order of dims")
    if dim is not None:
        before = math.prod(eqn.shape(0)[:dim])
        kept = out is not None and math.prod(eqn.out_shape[:out]) == before
        eqn.need(kept, "merges rows into a slower dim")


def _squeeze(eqn: Pair) -> None:
    eqn.same()
    gone = [d % len(eqn.shape(0)) for d in eqn.params["dimensions"]]
    _without(eqn, gone, "removes the dim of the rows")


def _reduce(eqn: Pair) -> None:
    eqn.same(*(name for name in eqn.params if "sharding" not in name))
    dim = eqn.dims[0]
    eqn.need(dim is None or dim not in eqn.params["axes"], f"over dim {dim}")
    _without(eqn, eqn.params["axes"], "over rows")


def _without(eqn: Pair, gone: Iterable[int], how: str) -> None:
    dim = eqn.one()
    if dim is not None:
        eqn.need(dim not in gone, how)
        dim -= sum(d < dim for d in gone)
    eqn.need_outs(dim)


def _transpose(eqn: Pair) -> None:
    eqn.same()
    dim = eqn.one()
    eqn.need_outs(None if dim is None else list(eqn.params["permutation"]).index(dim))


def _along(parameter: str) -> Callable[[Pair], None]:
    """Works along one dim; the rows must lie in another, the same one in all operands."""

    def rule(eqn: Pair) -> None:
        eqn.same()
        dim, axis = eqn.dims[0], eqn.params[parameter]
        eqn.need(all(own == dim for own in eqn.dims), "of operands that lie differently")
        eqn.need(dim is None or dim != axis % len(eqn.shape(0)), f"along dim {dim}")
        eqn.need_outs(dim)

    return rule


def _reverse(eqn: Pair) -> None:
    eqn.same()
    dim = eqn.one()
    eqn.need(dim not in eqn.params["dimensions"], "turns the rows round")
    eqn.need_outs(dim)


def _stack(eqn: Pair) -> None:
    eqn.same()
    dim = eqn.dims[0]
    eqn.need(all(own == dim for own in eqn.dims), "of operands that lie differently")
    eqn.need_outs(None if dim is None else dim + (eqn.params["axis"] <= dim))


def _unstack(eqn: Pair) -> None:
    eqn.same()
    _without(eqn, [eqn.params["axis"]], "over rows")


def _tile(eqn: Pair) -> None:
    eqn.same()
    dim = eqn.one()
    reps = tuple(eqn.params["reps"])
    eqn.need(len(reps) == len(eqn.shape(0)), "adds dims")
    eqn.need(dim is None or reps[dim] == 1, "repeats rows")
    eqn.need_outs(dim)


def _pad(eqn: Pair) -> None:
    eqn.same()
    dim = eqn.one()
    eqn.need(dim is None or tuple(eqn.params["padding_config"][dim]) == (0, 0, 0), "adds rows")
    eqn.need_outs(dim)


def _slice(eqn: Pair) -> None:
    dim = eqn.one()
    eqn.same("start_indices", "strides")
    if dim is not None:
        stride = (eqn.params["strides"] or [1] * (dim + 1))[dim]
        eqn.need(eqn.params["start_indices"][dim] == 0 and stride == 1, f"of dim {dim}")
        eqn.need(eqn.shape(0)[dim] == eqn.out_shape[dim], f"of dim {dim}")
    eqn.need_outs(dim)
    _other_sizes(eqn, "limit_indices", dim)


def _dynamic_slice(eqn: Pair) -> None:
    dim = eqn.one()
    eqn.need(dim is None or eqn.shape(0)[dim] == eqn.out_shape[dim], f"of dim {dim}")
    eqn.need_outs(dim)  # a slice of all rows begins with the first one, whatever it is told
    _other_sizes(eqn, "slice_sizes", dim)


def _other_sizes(eqn: Pair, parameter: str, dim: Dim) -> None:
    small, large = eqn.small.params[parameter], eqn.large.params[parameter]
    for d, (a, b) in enumerate(zip(small, large, strict=True)):
        eqn.need(d == dim or a == b, f"depends on the number of rows by {parameter}")
    if dim is not None:
        eqn.need(large[dim] == shape_of(eqn.large.invars[0])[dim], f"of dim {dim}")


def _dynamic_update_slice(eqn: Pair) -> None:
    eqn.same()
    dim = eqn.dims[0]
    eqn.need(eqn.dims[1] == dim, "of operands that lie differently")
    eqn.need(all(own is None for own in eqn.dims[2:]), "at places that lie by rows")
    eqn.need(dim is None or eqn.shape(1)[dim] == eqn.shape(0)[dim], "of some rows")
    eqn.need_outs(dim)


def _dot_general(eqn: Pair) -> None:
    eqn.same("dimension_numbers", "preferred_element_type")
    contracted, batch = eqn.params["dimension_numbers"]
    outs: list[Dim] = []
    for side, dim in enumerate(eqn.dims):
        if dim is None:
            continue
        eqn.need(dim not in contracted[side], "sums over rows")
        if dim in batch[side]:
            eqn.need(eqn.dims[0] is not None and eqn.dims[1] is not None, "of rows with others")
            outs.append(list(batch[side]).index(dim))
        else:
            outs.append(_free_place(eqn, side, dim))
    eqn.need(len(set(outs)) <= 1, "of rows with other rows")
    eqn.need_outs(outs[0] if outs else None)


def _free_place(eqn: Pair, side: int, dim: int) -> int:
    """Where a dim of one operand that is neither summed over nor shared lies in the result."""
    contracted, batch = eqn.params["dimension_numbers"]

    def free(of: int) -> list[int]:
        return [d for d in range(len(eqn.shape(of))) if d not in (*contracted[of], *batch[of])]

    return len(batch[0]) + side * len(free(0)) + free(side).index(dim)


def _convolution(eqn: Pair) -> None:
    eqn.same()
    dim, numbers = eqn.one(), eqn.params["dimension_numbers"]
    if dim is not None:
        eqn.need(dim == numbers.lhs_spec[0], "sums over rows")
        eqn.need(eqn.params["batch_group_count"] == 1, "in groups of rows")
        dim = numbers.out_spec[0]
    eqn.need_outs(dim)


def _window(eqn: Pair) -> None:
    eqn.same()
    dims = set(eqn.dims) if eqn.name == "select_and_gather_add" else {eqn.one()}
    eqn.need(len(dims) == 1, "of operands that lie differently")
    dim = dims.pop()
    if dim is not None:
        p = eqn.params
        steps = [p[k][dim] for k in _WINDOW_STEPS if p.get(k) is not None]
        alone = all(step == 1 for step in steps) and tuple(p["padding"][dim]) == (0, 0)
        eqn.need(alone, "over rows")
    eqn.need_outs(dim)


_WINDOW_STEPS = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


def _gather(eqn: Pair) -> None:
    table, at = eqn.dims
    numbers = eqn.params["dimension_numbers"]
    eqn.same("dimension_numbers", "mode", "fill_value")
    eqn.need(at is None or at < len(eqn.shape(1)) - 1, "by rows as places")
    whole = list(range(len(eqn.out_shape)))
    by_places = [d for d in whole if d not in numbers.offset_dims]
    out = None if at is None else by_places[at]
    if table is not None and table in numbers.operand_batching_dims:
        place = list(numbers.operand_batching_dims).index(table)
        eqn.need(at == numbers.start_indices_batching_dims[place], "of rows by other rows")
    elif table is not None:
        out = _gathered_place(eqn, table)
        eqn.need(at is None, "of rows by other rows")
    else:
        eqn.same("slice_sizes")
    eqn.need_outs(out)


def _gathered_place(eqn: Pair, table: int) -> int:
    """Where the rows of the table lie in the result; all of them must be taken."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    left_out = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    whole = sizes[table] == eqn.shape(0)[table] and table not in left_out
    eqn.need(whole and table not in numbers.start_index_map, "of some rows")
    _other_sizes(eqn, "slice_sizes", table)
    kept = [d for d in range(len(eqn.shape(0))) if d not in left_out]
    return numbers.offset_dims[kept.index(table)]


def _random_bits(eqn: Pair) -> None:
    """Threefry counts elements from the first on, so that more rows leave the first ones' bits."""
    import jax

    eqn.same("bit_width")
    eqn.need(eqn.one() is None and not eqn.shape(0), "of several keys")
    config: Any = jax.config
    key = str(eqn.small.invars[0].aval.dtype)
    counts = config.jax_threefry_partitionable and "fry" in key
    eqn.need(eqn.outs[0] is None or bool(counts), "of a generator that is not Threefry")
    eqn.need(eqn.outs[0] in (None, 0), "with rows that are not the slowest dim")


def _top_k(eqn: Pair) -> None:
    eqn.same()
    dim = eqn.one()
    axis = eqn.params.get("axis", len(eqn.shape(0)) - 1)
    eqn.need(dim is None or dim != axis % len(eqn.shape(0)), "over rows")
    eqn.need_outs(dim)


def _fft(eqn: Pair) -> None:
    eqn.same()
    dim = eqn.one()
    rank = len(eqn.shape(0))
    eqn.need(dim is None or dim < rank - len(eqn.params["fft_lengths"]), "over rows")
    eqn.need_outs(dim)


_ELEMENTWISE = (  # one text: a list would be a page long
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e"
    " bitcast_convert_type cbrt ceil clamp conj convert_element_type copy copy_p cos cosh digamma"
    " div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite"
    " le lgamma log log1p logistic lt max min mul ne neg nextafter not optimization_barrier or"
    " polygamma population_count pow real reduce_precision rem round rsqrt select_n"
    " sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt"
    " square stop_gradient sub tan tanh xor zeta"
)

RULES: dict[str, Callable[[Pair], None]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(
        ["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"],
        _reduce,
    ),
    **dict.fromkeys(["reduce_xor", "argmax", "argmin"], _reduce),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _along("axis")),
    **dict.fromkeys(["concatenate", "sort"], _along("dimension")),
    **dict.fromkeys(
        ["reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add"],
        _window,
    ),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "fft": _fft,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "random_bits": _random_bits,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "split": _along("axis"),
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
