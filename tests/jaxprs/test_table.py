"""The table of primitives: what it says of dims is what the primitives do."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, primitives
from primitives import CASES, one, one_device

import meshwright
from meshwright import _compat
from meshwright.jaxprs import link_rows
from meshwright.jaxprs.edits import equations
from meshwright.jaxprs.links import How, Link, Place
from meshwright.jaxprs.primitives import (
    CALLS,
    CONTROL_FLOW,
    MAKES_COMPLEX,
    MOVES,
    POOLING,
    PRODUCTS,
    SUMS,
    TABLE,
    inner_jaxprs,
    links_of,
    opened,
    shape_of,
)

LEFT_OUT = """
    after_all all_gather all_to_all axis_index create_token dce_sink get pmax pmin ppermute
    ragged_all_to_all stage swap
    approx_top_k cholesky_update custom_lin custom_linear_solve hessenberg ormqr random_gamma
    select_and_scatter symmetric_product tridiagonal
"""  # between devices or with an effect; then what is rare
WITH_JAXPRS = (
    "call closed_call cond custom_jvp_call custom_vjp_call eval_jaxpr jit remat2 scan while"
)
WITHOUT_A_CASE = {
    "empty2",  # a number without dims, which only JAX' own rule for scans makes
    "pbroadcast",  # XLA has it for GPUs alone
}
# add_any up to JAX 0.10; the others from 0.11 and 0.12 on
OF_SOME_RELEASES = {"add_any", "log2", "one_minus_square", "polynomial"}
SPLIT, WHOLE = jax.P("i"), jax.P()
BETWEEN_DEVICES = {  # inside of shard_map: how operands and results lie
    "psum": (WHOLE, WHOLE),
    "psum_invariant": (SPLIT, WHOLE),
    "pvary": (WHOLE, SPLIT),
}


def test_every_primitive_of_jax_has_a_row_or_is_left_out_on_purpose() -> None:
    public = {
        getattr(module, name).name
        for module in (lax, lax.linalg, primitives)
        for name in dir(module)
        if name.endswith("_p")
    }
    assert public - set(TABLE) == public & {*LEFT_OUT.split(), *WITH_JAXPRS.split()}


def test_every_row_has_a_case() -> None:
    met = {eqn.primitive.name for case in CASES.values() for eqn in equations(case.traced())}
    assert set(TABLE) - met - OF_SOME_RELEASES == WITHOUT_A_CASE


def test_properties_name_what_the_table_has() -> None:
    calls = {*WITH_JAXPRS.split(), "checkpoint", "core_call"}  # of some releases
    assert calls >= CALLS | CONTROL_FLOW
    of_rows = SUMS | MOVES | POOLING | MAKES_COMPLEX
    assert of_rows <= set(TABLE)
    assert {"dot_general", "conv_general_dilated"} == PRODUCTS


@pytest.mark.parametrize("room", ["step", "frontends", "named", "run"])
def test_rooms_keep_no_lists_of_primitives(room: str) -> None:
    """What is said of a primitive is said in the table; a pair of names may be a special case."""
    known = {*TABLE, *WITH_JAXPRS.split(), "checkpoint", "core_call"}
    lists = [
        f"{path.name}: {ast.unparse(node)}"
        for path in (Path(meshwright.__file__).parent / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Tuple | ast.Set | ast.List)
        and len(node.elts) > 2
        and {getattr(element, "value", None) for element in node.elts} <= known
    ]
    assert lists == []


# What changes where one index of an operand does


def followed(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> Iterator[Any]:
    """Each equation, those of calls too, with the values of its operands."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
        inner = inner_jaxprs(eqn)
        if not inner:
            yield eqn, values
        if eqn.primitive.name == "shard_map":  # over one device
            yield from followed(eqn.params["jaxpr"], (), values)
        elif len(inner) == 1 and eqn.primitive.name not in ("scan", "cond"):
            ((called,),) = inner.values()
            yield from followed(opened(called), getattr(called, "consts", ()), values)
        known.update(zip(eqn.outvars, evaluated(eqn, values), strict=True))


def evaluated(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation; of what is between devices, on a mesh of one."""
    if eqn.primitive.name not in BETWEEN_DEVICES:
        return _compat.evaluate(eqn, list(values))

    def run(*values: Any) -> list[Any]:
        return _compat.evaluate(eqn, list(values))

    name, mesh = eqn.primitive.name, one_device()
    before, after = BETWEEN_DEVICES[name]
    checked = name != "psum"
    mapped = jax.shard_map(run, mesh=mesh, in_specs=before, out_specs=after, check_vma=checked)
    return mapped(*values)


def faults(eqn: Any, values: Sequence[Any]) -> Iterator[str]:
    """Where the links of an equation promise more than it keeps."""
    links = links_of(eqn)
    before = evaluated(eqn, values)
    for link in links:
        for operand, dim in link.ins:
            size = shape_of(eqn.invars[operand])[dim]
            for index in {0, size - 1} if size > 1 else ():
                new = list(values)
                new[operand] = changed(values[operand], dim, index)
                after = evaluated(eqn, new)
                for result, (old, now) in enumerate(zip(before, after, strict=True)):
                    where = differs(old, now)
                    if not may_change(eqn, links, link, (operand, dim), result, index, where):
                        yield f"{eqn.primitive.name}: {link}, operand {operand}, result {result}"


def changed(value: Any, dim: int, index: int) -> Any:
    """The value with other elements at one index of a dim."""
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        other = jax.random.clone(jax.random.fold_in(jax.random.key(7), 3))
        at = (slice(None),) * dim + (index,)
        return value.at[at].set(other)
    host = np.moveaxis(np.array(value), dim, 0)
    if host.dtype == bool:
        host[index] = ~host[index]
    elif np.issubdtype(host.dtype, np.integer):
        host[index] = (host[index] + 1) % 3
    else:
        draw = np.random.default_rng(index).uniform(0.1, 0.9, host[index].shape)
        host[index] = draw.astype(host.dtype)
    return jax.numpy.asarray(np.moveaxis(host, 0, dim))


def differs(one: Any, other: Any) -> np.ndarray:
    if jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
        return np.any(np.asarray(one) != np.asarray(other), -1)
    one, other = (np.asarray(operand) for operand in (one, other))
    if one.dtype.kind in "fc":  # a series is summed until all its elements are near enough
        return ~np.isclose(one, other, 1e-5, 0, equal_nan=True)
    return one != other


def may_change(
    eqn: Any,
    links: Sequence[Link],
    link: Link,
    place: Place,
    result: int,
    index: int,
    where: np.ndarray,
) -> bool:
    """Whether a change at this index of an operand may change a result there."""
    size = shape_of(eqn.invars[place[0]])[place[1]]
    dims = [dim for number, dim in link.outs if number == result]
    groups = [row for row in links if row.how is How.GROUPS and row.ins[0] == place]
    if link.how is not How.GROUPS and groups:  # about the rest of the dim
        index %= size // groups[0].size
    if link.how in (How.EACH, How.AT):
        return not where.any() or (bool(dims) and only(where, dims, lambda at: at == index))
    if link.how is How.MERGE:
        ins = [shape_of(eqn.invars[0])[dim] for _, dim in link.ins]
        own = np.unravel_index(np.arange(np.prod(ins)), ins)[link.ins.index(place)]
        return only(where, dims, lambda at: own[at] == index)
    if link.how is How.GROUPS:
        (outs,) = [row.outs for row in links if row.how is How.EACH and link.ins[1] in row.ins]
        group, wide = index * link.size // size, where.shape[outs[0][1]]
        return only(where, [outs[0][1]], lambda at: at * link.size // wide == group)
    return True


def only(where: np.ndarray, dims: Sequence[int], allowed: Any) -> bool:
    """Whether all that differs is at allowed places of these dims, taken as one."""
    others = tuple(dim for dim in range(where.ndim) if dim not in dims)
    return bool(np.all(allowed(np.flatnonzero(where.any(others)))))


HEAVY = (  # to compile
    "cholesky eigh lu qr random_bits solve svd triangular_solve tridiagonal_solve threefry2x32"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name.split()[0] in HEAVY.split() else ())
        for name in CASES
    ],
)
def test_what_changes_is_what_the_links_say(name: str) -> None:
    case = CASES[name]
    closed = case.traced()
    for eqn, values in followed(closed.jaxpr, closed.consts, case.arguments()):
        avals = [str(variable.aval) for variable in (*eqn.invars, *eqn.outvars)]
        own = f"{eqn.primitive.name} {eqn.params} {avals}"
        if own not in _SEEN and eqn.primitive.name in TABLE:
            agrees(eqn)
            assert not list(faults(eqn, values))
            _SEEN.add(own)


_SEEN: set[str] = set()  # many a case has the same broadcasts


def agrees(eqn: Any) -> None:
    """Every dim of an operand is in a link, and in one alone unless it is split; sizes agree."""
    links = [link for link in links_of(eqn) if link.how is not How.GROUPS]
    ins = [place for link in links if link.how is not How.ALONG for place in link.ins]
    assert len(set(ins)) == len(ins)
    ins += [place for link in links for place in link.ins]
    shapes = [shape_of(var) for var in eqn.invars]
    large = {(n, d) for n, shape in enumerate(shapes) for d, size in enumerate(shape) if size > 1}
    assert large <= set(ins)
    for link in links:
        sizes = {shapes[operand][dim] for operand, dim in link.ins} - {1}
        sizes |= {shape_of(eqn.outvars[n])[dim] for n, dim in link.outs}
        rest = eqn.params.get("batch_group_count", 1) > 1  # the rows of one group
        assert link.how is not How.EACH or len(sizes) == 1 or rest


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("cumsum", link_rows.elementwise),
        ("reshape", link_rows.elementwise),
        ("dot_general", link_rows.batches(1)),
        ("conv_general_dilated", link_rows.itself),
        ("gather", link_rows.itself),
    ],
)
def test_a_row_that_promises_too_much_is_found(monkeypatch, name, row) -> None:
    cases = {
        "cumsum": CASES["cumsum"],
        "reshape": one(lambda x: x.reshape(6, 4), (4, 6)),
        "dot_general": CASES["matmul"],
        "conv_general_dilated": CASES["convolution"],
        "gather": CASES["gather rows"],
    }
    closed, args = cases[name].traced(), cases[name].arguments()
    monkeypatch.setitem(TABLE, name, row)
    results = [
        fault
        for eqn, values in followed(closed.jaxpr, closed.consts, args)
        if eqn.primitive.name == name
        for fault in faults(eqn, values)
    ]
    assert results
