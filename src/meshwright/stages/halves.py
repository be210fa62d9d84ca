"""A block as three functions: its results with what is kept of them, the gradient of its input, and
the gradients of its weights, which can wait.

Kept are the results of products and whatever else takes time; what is elementwise is computed
again. The gradients of weights are cut off where the equations of the backward pass divide, so
nothing is required of the model (zero bubble, Qi et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import _compat
from ..jaxprs.flops import equation_flops
from ..jaxprs.primitives import TABLE, inner_jaxprs, opened
from ..jaxprs.walk import LOOPS

Var = Any
_DRAWS = frozenset(("random_bits", "rng_bit_generator", "threefry2x32"))


class Halves:
    """The parts of ``block(params, rest, x) -> y``, traced for arguments of these shapes.

    ``params`` and ``x`` are lists of arrays, with gradients; ``rest`` is any pytree, without.
    """

    def __init__(self, block: Callable[..., list[Any]], params: Any, rest: Any, x: Any) -> None:
        import jax

        inputs, self._inputs = jax.tree.flatten((params, rest, x))
        trees: list[Any] = []

        def forward(*flat: Any) -> tuple[list[Any], list[Any]]:
            params, rest, x = self._inputs.unflatten(flat)
            y, pull = jax.vjp(lambda params, x: block(params, rest, x), params, x)
            leaves, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return y, leaves

        self._forward = _Equations(forward, inputs)
        count = len(x)
        self._results, self._leaves = self._forward.outs[:count], self._forward.outs[count:]
        self._kept = self._forward.costly(self._leaves)
        kept = [_shape(var) for var in self._kept]

        def backward(*flat: Any) -> tuple[Any, Any]:
            known, gradient = flat[: len(inputs) + len(kept)], flat[len(inputs) + len(kept) :]
            given = [*self._forward.ins, *self._kept]
            leaves = self._forward.run(self._leaves, given, known)
            return trees[-1].unflatten(leaves)(list(gradient))

        self._backward = _Equations(backward, [*inputs, *kept, *map(_shape, self._results)])
        known = len(inputs) + len(kept)
        self._known, self._gradient = self._backward.ins[:known], self._backward.ins[known:]
        self._of_params = self._backward.outs[: len(params)]
        self._of_x = self._backward.outs[len(params) :]
        late = self._backward.reached(self._gradient)
        made = {*self._gradient, *self._backward.made_for(self._of_x)} & late
        self._cut = self._backward.first_met(self._of_params, made)

    def forward(self, params: Any, rest: Any, x: Any) -> tuple[list[Any], list[Any]]:
        """The results, and what the others need of the way to them."""
        flat = self._inputs.flatten_up_to((params, rest, x))
        wanted = [*self._results, *self._kept]
        found = self._forward.run(wanted, self._forward.ins, flat)
        return found[: len(self._results)], found[len(self._results) :]

    def backward(
        self, params: Any, rest: Any, x: Any, kept: Sequence[Any], gradient: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The gradient of ``x``, and what :meth:`weights` needs beside what is kept."""
        flat = self._inputs.flatten_up_to((params, rest, x))
        given, values = [*self._known, *self._gradient], [*flat, *kept, *gradient]
        found = self._backward.run([*self._of_x, *self._cut], given, values)
        return found[: len(self._of_x)], found[len(self._of_x) :]

    def weights(
        self, params: Any, rest: Any, x: Any, kept: Sequence[Any], cut: Sequence[Any]
    ) -> list[Any]:
        """The gradients of ``params``."""
        flat = self._inputs.flatten_up_to((params, rest, x))
        given, values = [*self._known, *self._cut], [*flat, *kept, *cut]
        return self._backward.run(self._of_params, given, values)


class _Equations:
    """A function of flat values as equations, those of calls among them."""

    def __init__(self, function: Callable[..., Any], shapes: Sequence[Any]) -> None:
        import jax

        traced = jax.make_jaxpr(function)(*shapes)
        closed = jax.make_jaxpr(lambda *flat: _inlined(traced, flat))(*shapes)
        jaxpr = closed.jaxpr
        self.ins, self.outs, self._eqns = list(jaxpr.invars), list(jaxpr.outvars), jaxpr.eqns
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._made = {var: n for n, eqn in enumerate(self._eqns) for var in eqn.outvars}

    def run(self, wanted: Sequence[Any], given: Sequence[Var], values: Sequence[Any]) -> list[Any]:
        """The values of variables, from those that are given."""
        held = {**self._constants, **dict(zip(given, values, strict=True))}
        for number in self._slice(wanted, held):
            eqn = self._eqns[number]
            read = [_value(held, atom) for atom in eqn.invars]
            held |= {
                var: value
                for var, value in zip(eqn.outvars, _compat.evaluate(eqn, read), strict=True)
                if var not in held
            }
        return [_value(held, atom) for atom in wanted]

    def costly(self, wanted: Iterable[Any]) -> list[Var]:
        """The variables that others are cheaply computed from, beside the arguments."""
        return self.first_met(
            wanted, {v for e in self._eqns if not _is_cheap(e) for v in e.outvars}
        )

    def first_met(self, wanted: Iterable[Any], stops: set[Var]) -> list[Var]:
        """Which of ``stops`` the equations for ``wanted`` read first."""
        met: dict[Var, None] = {}
        for number in (None, *self._slice(wanted, stops)):
            read = wanted if number is None else self._eqns[number].invars
            met |= dict.fromkeys(var for var in _variables(read) if var in stops)
        return list(met)

    def made_for(self, wanted: Iterable[Any]) -> set[Var]:
        """All that is computed on the way to these variables."""
        return {var for number in self._slice(wanted, ()) for var in self._eqns[number].outvars}

    def reached(self, given: Iterable[Var]) -> set[Var]:
        """All that depends on these variables."""
        found = set(given)
        for eqn in self._eqns:
            if found.intersection(_variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def _slice(self, wanted: Iterable[Any], stops: Iterable[Var]) -> list[int]:
        stops, found = set(stops), set[int]()
        waiting = [var for var in _variables(wanted) if var not in stops]
        while waiting:
            number = self._made.get(waiting.pop())
            if number is not None and number not in found:
                found.add(number)
                waiting += [v for v in _variables(self._eqns[number].invars) if v not in stops]
        return sorted(found)


def _inlined(called: Any, flat: Sequence[Any]) -> list[Any]:
    jaxpr = opened(called)
    held = dict(zip(jaxpr.constvars, getattr(called, "consts", ()), strict=True))
    held |= zip(jaxpr.invars, flat, strict=True)
    for eqn in jaxpr.eqns:
        read = [_value(held, atom) for atom in eqn.invars]
        inner = {} if eqn.primitive.name in LOOPS else inner_jaxprs(eqn)
        calls = [jaxpr for jaxprs in inner.values() for jaxpr in jaxprs]
        results = _inlined(calls[0], read) if calls else _compat.evaluate(eqn, read)
        held.update(zip(eqn.outvars, results, strict=True))
    return [_value(held, atom) for atom in jaxpr.outvars]


def _is_cheap(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name in TABLE and name not in _DRAWS and equation_flops(eqn) == 0


def _value(held: dict[Var, Any], atom: Any) -> Any:
    return atom.val if hasattr(atom, "val") else held[atom]


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if not hasattr(atom, "val")]


def _shape(atom: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
