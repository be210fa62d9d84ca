"""Rules of primitives that work element by element, along dims, or only change the shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .factors import Dim, Dims, age, label
from .facts import Facts, Rule


def pointwise(f: Facts) -> list[Dims]:
    """Each dim of the results is that of every operand which has all of it."""
    return f.distinct([_pointwise(f, number) for number in range(len(f.eqn.outvars))])


def _pointwise(f: Facts, number: int) -> Dims:
    shape = f.out_shape(number)
    alike = [operand for operand, dims in enumerate(f.ins) if len(dims) == len(shape)]
    f.whole += [dim for o, dims in enumerate(f.ins) if o not in alike for dim in dims]
    return tuple(_together(f, alike, place, size) for place, size in enumerate(shape))


def _together(f: Facts, operands: Sequence[int], place: int, size: int) -> Dim:
    """One dim of a result. Where operands do not agree, it is that of the one that was made first,
    a value rather than a gradient; of two gradients, the dim that was met first."""
    full = [operand for operand in operands if f.shape(operand)[place] == size]
    f.whole += [f.ins[o][place] for o in operands if o not in full]  # one element is of no dim
    if not full:
        return f.new(size)
    dims = [f.ins[operand][place] for operand in full]
    if not all(dims):
        return ()
    if f.eqn.primitive.name == "add_any":
        wanted = min(dims, key=age)
    else:
        wanted = min(zip(full, dims, strict=True), key=lambda each: f.made[each[0]])[1]
    for operand, dim in zip(full, dims, strict=True):
        f.join(wanted, operand, dim)
    return wanted


def each_alone(f: Facts) -> list[Dims]:
    """Each result is as the operand at its place, as of a barrier."""
    return list(f.ins)


def along(*names: str) -> Rule:
    """Works along the dim, or dims, that a parameter names, which it needs whole."""

    def rule(f: Facts) -> list[Dims]:
        value = next(f.params[name] for name in names if name in f.params)
        rank = len(f.ins[0])
        for place in value if isinstance(value, Sequence) else [value]:
            f.whole += [dims[place % rank] for dims in f.ins if len(dims) == rank]
        return pointwise(f)

    return rule


def top_k(f: Facts) -> list[Dims]:
    """The best along one dim. XLA of JAX 0.10 gathers all other dims, too, for CPUs at least."""
    axis = f.params.get("axis", -1) % len(f.ins[0])
    f.whole += f.ins[0]
    size = f.out_shape()[axis]
    one = tuple(f.new(size) if i == axis else dim for i, dim in enumerate(f.ins[0]))
    return [one for _ in f.eqn.outvars]


def last_whole(f: Facts) -> list[Dims]:
    """Fourier transforms: of the last dims."""
    count = len(f.params["fft_lengths"])
    f.whole += f.ins[0][-count:]
    return [tuple(f.kept(0, i, size) for i, size in enumerate(f.out_shape()))]


def summed(f: Facts) -> list[Dims]:
    """Reductions that can be done piece by piece: the results are summed over devices."""
    f.summed += [dims[i] for dims in f.ins for i in f.params["axes"] if dims]
    return _reduced(f)


def reduced_whole(f: Facts) -> list[Dims]:
    """Reductions that need all of the dim at once."""
    axes = f.params["axes"] if "axes" in f.params else f.params["dimensions"]
    f.whole += [dims[i] for dims in f.ins if dims for i in axes]
    return _reduced(f)


def _reduced(f: Facts) -> list[Dims]:
    axes = f.params["axes"] if "axes" in f.params else f.params["dimensions"]
    for operand, dims in enumerate(f.ins[1:], 1):
        for wanted, dim in zip(f.ins[0], dims, strict=False):  # scalars stand where others begin
            f.join(wanted, operand, dim)
    kept = tuple(dim for i, dim in enumerate(f.ins[0]) if i not in axes)
    return [kept for _ in f.eqn.outvars]


def transpose(f: Facts) -> list[Dims]:
    return [tuple(f.ins[0][i] for i in f.params["permutation"])]


def broadcast(f: Facts) -> list[Dims]:
    out = list(f.factors.new_dims(f.out_shape()))
    for i, place in enumerate(f.params["broadcast_dimensions"]):
        if f.shape(0)[i] == f.out_shape()[place]:
            out[place] = f.ins[0][i]
    return [tuple(out)]


def squeeze(f: Facts) -> list[Dims]:
    gone = [i % len(f.ins[0]) for i in f.params["dimensions"]]
    return [tuple(dim for i, dim in enumerate(f.ins[0]) if i not in gone)]


def reshape(f: Facts) -> list[Dims]:
    """Of dims that are merged the slowest carries on, and of a dim that is split the slowest."""
    if f.params.get("dimensions") is not None:
        return unknown(f)
    given = [dim or f.new(size) for dim, size in zip(f.ins[0], f.shape(0), strict=True)]
    out = list(f.factors.new_dims(f.out_shape()))
    for before, after in _runs(f.shape(0), f.out_shape()):
        if len(before) == len(after) == 1:
            out[after[0]] = given[before[0]]
            continue
        merged = tuple(factor for i in before for factor in given[i])
        split = tuple(factor for i in after for factor in out[i])
        tied = f.factors.tie(merged, split)
        carried = {label(out[i]) for i in after} if tied else set()
        f.whole += [given[i] for i in before if label(given[i]) not in carried]
    return [tuple(out)]


def _runs(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
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


def new(f: Facts) -> list[Dims]:
    """Made from nothing, or by each device for its own piece, as random bits are."""
    return [f.factors.new_dims(f.out_shape(i)) for i in range(len(f.eqn.outvars))]


def unknown(f: Facts) -> list[Dims]:
    """What is not known joins nothing and needs every operand whole."""
    f.whole += [dim for dims in f.ins for dim in dims]
    return new(f)


def concatenate(f: Facts) -> list[Dims]:
    place = f.params["dimension"]
    f.whole += [dims[place] for dims in f.ins]
    out = list(f.ins[0])
    for operand, dims in enumerate(f.ins):
        for i, dim in enumerate(dims):
            if i != place and operand:
                if out[i]:
                    f.join(out[i], operand, dim)
                else:
                    out[i] = dim
    out[place] = f.new(f.out_shape()[place])
    return f.distinct([tuple(out)])


def stack(f: Facts) -> list[Dims]:
    axis = f.params["axis"] % len(f.out_shape())
    out = list(f.ins[0])
    for operand, dims in enumerate(f.ins[1:], 1):
        for wanted, dim in zip(out, dims, strict=True):
            f.join(wanted, operand, dim)
    return f.distinct([(*out[:axis], f.new(len(f.ins)), *out[axis:])])


def unstack(f: Facts) -> list[Dims]:
    axis = f.params["axis"] % len(f.ins[0])
    f.whole.append(f.ins[0][axis])
    one = tuple(dim for i, dim in enumerate(f.ins[0]) if i != axis)
    return [one for _ in f.eqn.outvars]


def some_of_each(f: Facts) -> list[Dims]:
    """Slices and pads: dims that the results have all of stay, of others a whole is needed."""
    outs = []
    for number in range(len(f.eqn.outvars)):
        shape = f.out_shape(number)
        outs.append(tuple(f.kept(0, i, size) for i, size in enumerate(shape)))
    return outs


def pad(f: Facts) -> list[Dims]:
    f.whole += [
        dim
        for dim, how in zip(f.ins[0], f.params["padding_config"], strict=True)
        if tuple(how) != (0, 0, 0)
    ]
    return some_of_each(f)


def tile(f: Facts) -> list[Dims]:
    if len(f.params["reps"]) != len(f.ins[0]):
        return unknown(f)
    return some_of_each(f)


def reverse(f: Facts) -> list[Dims]:
    f.whole += [f.ins[0][i] for i in f.params["dimensions"]]
    return [f.ins[0]]


_POINTWISE = (  # one text: a list would be a page long
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e"
    " cbrt ceil clamp complex conj convert_element_type copy copy_p cos cosh digamma"
    " div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac igamma_grad_a imag"
    " integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg"
    " nextafter not or polygamma population_count clz pow random_gamma_grad real reduce_precision"
    " regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint shift_left"
    " shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan"
    " tanh xor zeta name layout_constraint mesh_cast pvary psum psum_invariant pbroadcast"
    " threefry2x32 bitcast_convert_type"
)

_SUMS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"
_NEW = (
    "iota empty random_bits random_seed random_wrap random_unwrap random_split random_fold_in"
    " random_clone create_token"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_POINTWISE.split(), pointwise),
    **dict.fromkeys(_SUMS.split(), summed),
    **dict.fromkeys(_NEW.split(), new),
    **dict.fromkeys(["argmax", "argmin", "reduce"], reduced_whole),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], along("axis")),
    "broadcast_in_dim": broadcast,
    "concatenate": concatenate,
    "fft": last_whole,
    "optimization_barrier": each_alone,
    "pad": pad,
    "reshape": reshape,
    "rev": reverse,
    "slice": some_of_each,
    "sort": along("dimension"),
    "split": some_of_each,
    "squeeze": squeeze,
    "stack": stack,
    "tile": tile,
    "top_k": top_k,
    "transpose": transpose,
    "unstack": unstack,
}
