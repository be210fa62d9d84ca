"""How the dims of an equation's results follow from those of its operands: a row per primitive.

This is the only place that knows JAX's primitives. A row is a function that lists the *links* of
one equation: which dims of operands and results belong together, and :class:`How`. Links are what
Shardy's sharding rules call factors. Three engines read them and nothing else of a primitive:

- ``reach``: which axes of a mesh can reach which dims of every intermediate, for right gradients
  of split images;
- ``rows``: whether rows of a batch leave each other alone, so that it may be padded;
- ``joins``: which dims of a training step are one, and what splitting them costs, for the planner.

**How to add a primitive.** Write it into :data:`TABLE`, beside the function of ``link_rows`` that
describes it, nearly always one that is there: ``elementwise``, ``along("axis")`` for work along the
dim that a parameter names, ``batches(2)`` for what takes the last two dims together, ``counted``
for what is made of nothing. A new function yields a link per dim of the operands; a dim in no link
is one of size 1 that goes, and a dim of a result in no link is a new one. Where in doubt choose the
weaker ``How``: ``ALONG`` costs communication in a plan and padding, a false ``EACH`` costs right
numbers.
Then add a case to ``tests/jaxprs/primitives.py``; a test changes one index of each dim of each
operand there and compares what changes with the links. A primitive without a row is one link
``ANY``: every dim reaches every dim, rows mix, and a plan does it whole.
``tests/jaxprs/test_table.py`` lists those that are left so on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import link_rows as rows
from .links import How, Link, Row, Shape, Shapes


def links_of(eqn: Any) -> Sequence[Link]:
    """The links of an equation; one of ``ANY`` where its primitive has no row.

    >>> import jax, jax.numpy as jnp
    >>> product = jax.make_jaxpr(jnp.dot)(jnp.ones([2, 3]), jnp.ones([3, 4])).eqns[0]
    >>> [(link.how.name, link.ins, link.outs) for link in links_of(product)]
    [('SUM', ((0, 1), (1, 0)), ()), ('EACH', ((0, 0),), ((0, 0),)), ('EACH', ((1, 1),), ((0, 1),))]
    """
    params = eqn.params
    ins, outs = _shapes(eqn.invars), _shapes(eqn.outvars)
    row = TABLE.get(eqn.primitive.name, rows.unknown)
    if row is rows.elementwise:  # most equations
        return rows.in_place(tuple(map(len, ins)), tuple(map(len, outs)))
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
    alone = rows.elementwise, rows.itself, rows.bitcast, rows.sums, rows.picks
    return TABLE.get(eqn.primitive.name) in alone and len(shapes) <= 1


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


_ROWS: tuple[tuple[Row, str], ...] = (
    (
        rows.elementwise,
        """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
        clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv
        erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite
        layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne
        neg nextafter not one_minus_square or pbroadcast polygamma polynomial population_count pow
        psum psum_invariant pvary random_clone random_fold_in random_seed real reduce_precision
        regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint shift_left
        shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
        tanh threefry2x32 xor zeta
        """,
    ),
    (rows.itself, "optimization_barrier device_put"),
    (rows.counted, "iota"),
    (
        rows.random_bits,
        """
        empty empty2 random_bits random_split random_unwrap random_wrap rng_uniform
        """,
    ),
    (rows.bits, "rng_bit_generator"),
    # along dims
    (rows.along("axis"), "cumsum cumprod cummax cummin cumlogsumexp"),
    (rows.along("dimensions"), "rev"),
    (rows.along("dimension"), "sort"),
    (rows.top_k, "top_k"),
    (rows.fourier, "fft"),
    (rows.pad, "pad"),
    (rows.tile, "tile"),
    (rows.some_of_each, "slice"),
    (rows.split, "split"),
    (rows.dynamic_slice, "dynamic_slice"),
    (rows.dynamic_update_slice, "dynamic_update_slice"),
    (rows.concatenate, "concatenate"),
    (
        rows.window,
        "reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add",
    ),
    (rows.window_and_scatter, "select_and_scatter_add"),
    (rows.by_hand, "shard_map"),
    # other shapes
    (rows.bitcast, "bitcast_convert_type"),
    (rows.broadcast, "broadcast_in_dim"),
    (rows.reshape, "reshape"),
    (rows.squeeze, "squeeze"),
    (rows.stack, "stack"),
    (rows.transpose, "transpose"),
    (rows.unstack, "unstack"),
    # reductions and products
    (
        rows.sums,
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor",
    ),
    (rows.picks, "argmax argmin"),
    (rows.reduces(How.WHOLE, "dimensions"), "reduce"),
    (rows.dot_general, "dot_general"),
    (rows.convolution, "conv_general_dilated"),
    # places that are values
    (rows.gather, "gather"),
    (rows.scatter(How.WHOLE), "scatter scatter-mul scatter-min scatter-max"),
    (rows.scatter(How.SUM), "scatter-add scatter-sub"),
    # linear algebra
    (
        rows.batches(2),
        "cholesky eig eigh householder_product lu qr schur svd triangular_solve",
    ),
    (rows.batches(1), "lu_pivots_to_permutation tridiagonal_solve"),
)
TABLE: dict[str, Row] = {name: row for row, names in _ROWS for name in names.split()}

# Properties that the table alone does not tell.

# Products, which may sum in a wider type than that of their operands.
PRODUCTS = frozenset(name for name in TABLE if TABLE[name] in (rows.dot_general, rows.convolution))
# Results are sums over a dim of the operands, so that parts of that dim can be added up later.
SUMS = PRODUCTS | {"reduce_sum", "scatter-add"}
# Each element of the one operand is one of the result, elsewhere, and no number changes.
MOVES = frozenset(("reshape", "rev", "squeeze", "transpose"))
# These may make complex numbers of real ones.
MAKES_COMPLEX = frozenset(("complex", "conj", "fft", "eig"))
# Windows that reduce by a function which is known.
POOLING = frozenset(("reduce_window_max", "reduce_window_min", "reduce_window_sum"))
# Each entry of the one operand is an entry of the result, along any dim.
SAME_ENTRIES = frozenset(("convert_element_type", "copy", "copy_p"))
CHECKPOINTS = frozenset(("checkpoint", "remat2"))  # JAX has had two names
# These run one jaxpr once, as it is; JAX 0.11 calls it eval_jaxpr.
JITTED = frozenset(("jit", "closed_call", "core_call", "eval_jaxpr"))
CALLS = CHECKPOINTS | JITTED
CONTROL_FLOW = frozenset(("cond", "scan", "while"))
# These call Python on the host, for what it prints or also for what it returns.
PRINTS = frozenset(("debug_callback", "debug_print", "inspect_sharding"))
CALLBACKS = PRINTS | {"pure_callback", "io_callback"}
# These act on devices or on the host: they may do another thing each time, or with each piece.
OUTSIDE = CALLBACKS | frozenset(
    ["shard_map", "pallas_call", "core_map", "mpmd_map", "run_state", "run_scoped", "ffi_call"]
)
