"""Whether rows that are added to a batch leave what is computed from the others as it was.

A function is traced twice, for a few rows and for more, and the two jaxprs are walked side by side.
Each value of the small trace must be the beginning of the same value of the large one along the
one dim whose size differs, or equal to it where none does. Links of the table either carry that on
(each index by itself, a reshape that keeps rows slowest, what counts from the first row on) or end
it: a sum over rows, a parameter or a literal that is the number of rows, a trace of another form.
What is not known ends it too, so the answer errs to "mixed" and never to "apart".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from .. import _compat
from .links import How, Link, Place
from .primitives import OUTSIDE, inner_jaxprs, links_of, opened, shape_of
from .slices import variables

Dim = int | None  # the dim along which the large value goes on; None where both are equal


class RowsMixError(Exception):
    """Some value of the small trace is not the beginning of the large one's; says which."""


def row_dims(small: Any, large: Any) -> list[Dim]:
    """For each output of two closed jaxprs, the dim along which the small one is a beginning.

    The inputs of the small trace are taken to be beginnings of the large one's. Raises
    :class:`RowsMixError` where that is lost on the way.

    >>> import jax, jax.numpy as jnp
    >>> def two(f):
    ...     return [jax.make_jaxpr(f)(jnp.ones([rows, 3])) for rows in (5, 8)]
    >>> row_dims(*two(lambda x: (jnp.tanh(x), x.mean(1), x.T)))
    [0, 0, 1]
    >>> row_dims(*two(lambda x: x - x.mean(0)))
    Traceback (most recent call last):
    ...
    meshwright.jaxprs.rows.RowsMixError: reduce_sum over dim 0
    """
    _check_constants(small, large)
    return _walk(small.jaxpr, large.jaxpr)


def _walk(small: Any, large: Any) -> list[Dim]:
    """One pair of open jaxprs, whose inputs are beginnings."""
    pairs: dict[Any, Any] = {}  # of each value of the large one, that of the small one
    for a, b in zip(
        [*small.constvars, *small.invars], [*large.constvars, *large.invars], strict=True
    ):
        _dim_of(a, b, "an argument")
        pairs[b] = a
    needed = set(_needed(small))
    for number, b in _beside(small.eqns, large.eqns):
        if number is None:
            if (operand := b.invars[0]) in pairs:
                pairs[b.outvars[0]] = pairs[operand]
        elif number in needed:
            a = small.eqns[number]
            _Pair(a, b, pairs).check()
            pairs.update(zip(b.outvars, a.outvars, strict=True))
    return [_dim_of_atoms(a, b, pairs) for a, b in zip(small.outvars, large.outvars, strict=True)]


def _beside(small: Sequence[Any], large: Sequence[Any]) -> Iterator[tuple[int | None, Any]]:
    """The equations of the large trace, each with the number of the same one of the small trace.

    JAX leaves out a repeat in as many rows as there are, and so in one row: it has ``None``. What
    is repeated is the same for all rows, and the beginning of the repeats.
    """
    number, left_out = 0, len(large) - len(small)
    for eqn in large:
        if left_out and _repeats(eqn) and not _are_alike(small[number : number + 1], eqn):
            left_out -= 1
            yield None, eqn
        elif number < len(small):
            yield number, eqn
            number += 1
    if left_out or number < len(small):
        raise RowsMixError("the function has another form for more rows")


def _repeats(eqn: Any) -> bool:
    """Whether an equation repeats an array along one of its dims, of one element."""
    if eqn.primitive.name != "broadcast_in_dim" or isinstance(eqn.invars[0], Literal):
        return False
    operand, result = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.params["broadcast_dimensions"] != tuple(range(len(result))):
        return False
    return [m for m, n in zip(operand, result, strict=True) if m != n] == [1]


def _are_alike(small: Sequence[Any], eqn: Any) -> bool:
    """Whether an equation of the small trace repeats an array of the same dims, too."""
    return any(
        one.primitive is eqn.primitive
        and len(shape_of(one.outvars[0])) == len(shape_of(eqn.outvars[0]))
        and shape_of(one.invars[0]) == shape_of(eqn.invars[0])
        for one in small
    )


def _needed(jaxpr: Any) -> list[int]:
    """The numbers of the equations that the outputs depend on."""
    needs = {*variables(jaxpr.outvars)}
    needed: list[int] = []
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        if eqn.effects or not needs.isdisjoint(eqn.outvars):
            needs.update(variables(eqn.invars))
            needed.append(number)
    return needed[::-1]


class _Pair:
    """The same equation in both traces, with the dims along which operands and results go on."""

    def __init__(self, small: Any, large: Any, pairs: dict[Any, Any]) -> None:
        self.name: str = small.primitive.name
        if self.name != large.primitive.name or len(small.outvars) != len(large.outvars):
            raise RowsMixError(f"{self.name} is {large.primitive.name} for more rows")
        if small.effects or large.effects:
            raise RowsMixError(f"{self.name} has an effect")
        self.small, self.large = small, large
        self.dims = [
            _dim_of_atoms(a, b, pairs) for a, b in zip(small.invars, large.invars, strict=True)
        ]
        self.outs = [
            _dim_of(a, b, self.name) for a, b in zip(small.outvars, large.outvars, strict=True)
        ]

    def need(self, condition: bool, how: str) -> None:
        """Raise :class:`RowsMixError` unless the condition holds."""
        if not condition:
            raise RowsMixError(f"{self.name} {how}")

    def check(self) -> None:
        """Raise unless the results are beginnings, as the operands are."""
        cut_ins = [(n, dim) for n, dim in enumerate(self.dims) if dim is not None]
        cut_outs = [(n, dim) for n, dim in enumerate(self.outs) if dim is not None]
        if inner_jaxprs(self.large):
            self._calls()
        elif self.name == "optimization_barrier":
            self.need(self.dims == self.outs, "moves the rows elsewhere")
        elif self.name == "random_bits" and not cut_ins:
            self._same_parameters()
            self._random_bits()
        else:
            self.need(self.name not in OUTSIDE, "is not known to keep rows apart")
            self._same_parameters()
            links = links_of(self.large)  # in the small trace the rows may be a dim of one element
            if cut_ins:
                (link, *others) = dict.fromkeys(self._link_of(place, links) for place in cut_ins)
                self.need(not others, "of rows with other rows")
                self._carries(link, cut_outs)
            elif cut_outs:
                filled = {out for link in links if link.how is How.FILL for out in link.outs}
                self.need(filled.issuperset(cut_outs), "moves the rows elsewhere")

    def _link_of(self, place: Place, links: Sequence[Link]) -> Link:
        """The link that carries an operand's rows on."""
        link = next(candidate for candidate in links if place in candidate.ins)
        carries = link.how is How.EACH or (link.how is How.MERGE and link.ins[0] == place)
        self.need(carries, f"{_WORDS.get(link.how, 'mixes')} dim {place[1]}")
        return link

    def _carries(self, link: Link, cut_outs: Sequence[Place]) -> None:
        """Raise unless the rows of a link go on in all results, and nothing else does."""
        expected = link.outs[:1] if link.how is How.MERGE else link.outs
        self.need(list(expected) == list(cut_outs), "moves the rows elsewhere")
        self.need(len(cut_outs) == len(self.outs), "needs all rows")
        if link.how is How.EACH:
            for operand, dim in link.ins:
                one = self.dims[operand] is None and shape_of(self.large.invars[operand])[dim] == 1
                self.need(one or self.dims[operand] == dim, "of rows with other dims")
            places = ((self.small.invars, link.ins), (self.small.outvars, link.outs))
            sizes = [shape_of(atoms[n])[dim] for atoms, some in places for n, dim in some]
            self.need(len({*sizes} - {1}) <= 1, "of some rows")

    def _same_parameters(self) -> None:
        """Parameters are the same in both traces, but for sizes along the rows."""
        for name, small in self.small.params.items():
            large = self.large.params[name]
            if name in _SIZES_OF_OPERANDS:
                for dim, (a, b) in enumerate(zip(small, large, strict=True)):
                    self.need(a == b or dim == self.dims[0], f"depends on the rows by {name}")
            elif name not in _SIZES_OF_RESULTS and "sharding" not in name:
                self.need(_same(small, large), f"depends on the number of rows by {name}")

    def _random_bits(self) -> None:
        """Threefry counts elements from the first on: more rows leave the first ones' bits."""
        if self.outs == [None]:
            return
        config: Any = jax.config
        key = self.small.invars[0].aval
        threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        counts = bool(config.jax_threefry_partitionable and key.dtype == threefry.dtype)
        self.need(counts, "of a generator that is not Threefry")
        self.need(self.outs == [0] and not key.shape, "with rows that are not the slowest dim")

    def _calls(self) -> None:
        """The jaxprs inside, whose inputs and outputs have the shapes that say how rows lie."""
        called = [inner_jaxprs(eqn) for eqn in (self.small, self.large)]
        for a, b in zip(
            *([j for jaxprs in inner.values() for j in jaxprs] for inner in called), strict=True
        ):
            _check_constants(a, b)
            _walk(opened(a), opened(b))
        if self.name == "scan":
            for name in ("length", "reverse"):
                same = self.small.params[name] == self.large.params[name]
                self.need(same, f"depends on the number of rows by {name}")
            consts, carried = counts = _compat.scan_counts(self.large)
            same = _compat.scan_counts(self.small) == counts
            self.need(same, "depends on the number of rows by what it carries")
            over = self.dims[consts + carried :] + self.outs[carried:]
            self.need(0 not in over, "over rows")
        if self.name == "cond":
            self.need(self.dims[0] is None, "by rows")


_WORDS = {
    **{How.SUM: "over", How.WHOLE: "over", How.ALONG: "along", How.MERGE: "merges"},
    How.ANY: "is not known to keep apart",
}
_SIZES_OF_OPERANDS = ("limit_indices", "slice_sizes")  # one per dim of the first operand
_SIZES_OF_RESULTS = ("shape", "new_sizes", "reps")


def _dim_of_atoms(small: Any, large: Any, pairs: dict[Any, Any]) -> Dim:
    """The dim along which one operand goes on in the large trace."""
    if isinstance(small, Literal) or isinstance(large, Literal):
        if not (isinstance(small, Literal) and isinstance(large, Literal)):
            raise RowsMixError("the function has another form for more rows")
        if not _same(small.val, large.val):
            raise RowsMixError(f"the literal {small.val} is {large.val} for more rows")
        return None
    if pairs.get(large) is not small:
        raise RowsMixError("the function has another form for more rows")
    return _dim_of(small, large, "a value")


def _dim_of(small: Any, large: Any, what: str) -> Dim:
    """The dim in which two variables differ; raises if it is more than one, or their type."""
    a, b = shape_of(small), shape_of(large)
    types = (str(getattr(atom.aval, "dtype", None)) for atom in (small, large))
    same_type = len(a) == len(b) and len({*types}) == 1
    differing = [d for d, (m, n) in enumerate(zip(a, b, strict=same_type)) if m != n]
    if not same_type or len(differing) > 1:
        raise RowsMixError(f"{what} is {small.aval} and {large.aval} for more rows")
    return differing[0] if differing else None


def _check_constants(small: Any, large: Any) -> None:
    """Raise :class:`RowsMixError` unless the constants of two jaxprs are the same."""
    if not _same(*(tuple(getattr(jaxpr, "consts", ())) for jaxpr in (small, large))):
        raise RowsMixError("a constant depends on the number of rows")


def _same(small: Any, large: Any) -> bool:
    """Whether parameters, literals or constants are the same."""
    if small is large:
        return True
    if isinstance(small, tuple | list) and isinstance(large, tuple | list):
        return len(small) == len(large) and all(map(_same, small, large))
    if isinstance(small, np.ndarray | jax.Array) and isinstance(large, np.ndarray | jax.Array):
        if jax.numpy.issubdtype(small.dtype, jax.dtypes.prng_key):
            small, large = jax.random.key_data(small), jax.random.key_data(large)
        return small.dtype == large.dtype and np.array_equal(small, large)
    if hasattr(small, "eqns") or hasattr(small, "jaxpr"):
        constants = (tuple(getattr(jaxpr, "consts", ())) for jaxpr in (small, large))
        return str(small) == str(large) and _same(*constants)
    return type(small) is type(large) and bool(small == large or small != small)
