"""A block as three functions: its results with what is kept of them, the gradient of its input, and
the gradients of its weights, which can wait.

Kept are the results of products and whatever else takes time; what is elementwise is computed
again. The gradients of weights are cut off where the equations of the backward pass divide, so
nothing is required of the model (zero bubble, Qi et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax

from .. import _compat
from ..jaxprs.evaluation import evaluated, read
from ..jaxprs.flops import equation_flops
from ..jaxprs.narrowest import narrowest
from ..jaxprs.primitives import TABLE, inner_jaxprs, opened
from ..jaxprs.slices import needed_behind, reached, variables
from ..jaxprs.walk import LOOPS

Var = Any
_DRAWS = frozenset(("random_bits", "rng_bit_generator", "threefry2x32"))


class Halves:
    """The parts of ``block(params, rest, x) -> y``, traced for arguments of these shapes.

    ``params`` and ``x`` are lists of arrays, with gradients; ``rest`` is any pytree, without.
    """

    def __init__(self, block: Callable[..., list[Any]], params: Any, rest: Any, x: Any) -> None:
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
        self._residuals = self._forward.costly(self._leaves)
        residuals = [_shape(var) for var in self._residuals]

        def backward(*flat: Any) -> tuple[Any, Any]:
            count, gradient = (
                flat[: len(inputs) + len(residuals)],
                flat[len(inputs) + len(residuals) :],
            )
            known_vars = [*self._forward.ins, *self._residuals]
            leaves = self._forward.run(self._leaves, known_vars, count)
            return trees[-1].unflatten(leaves)(list(gradient))

        self._backward = _Equations(backward, [*inputs, *residuals, *map(_shape, self._results)])
        num_known = len(inputs) + len(residuals)
        self._forward_inputs, self._gradient = (
            self._backward.ins[:num_known],
            self._backward.ins[num_known:],
        )
        self._of_params = self._backward.outs[: len(params)]
        self._of_x = self._backward.outs[len(params) :]
        late = reached(self._backward.eqns, self._gradient)
        late_values = {*self._gradient, *self._backward.made_for(self._of_x)} & late
        self._cut = self._backward.first_met(self._of_params, late_values)

    def forward(self, params: Any, rest: Any, x: Any) -> tuple[list[Any], list[Any]]:
        """The results, and what the others need of the way to them."""
        flat = self._inputs.flatten_up_to((params, rest, x))
        outputs = [*self._results, *self._residuals]
        results = self._forward.run(outputs, self._forward.ins, flat)
        return results[: len(self._results)], results[len(self._results) :]

    def backward(
        self, params: Any, rest: Any, x: Any, residuals: Sequence[Any], gradient: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The gradient of ``x``, and what :meth:`weights` needs beside what is kept."""
        flat = self._inputs.flatten_up_to((params, rest, x))
        known_vars, values = (
            [*self._forward_inputs, *self._gradient],
            [*flat, *residuals, *gradient],
        )
        results = self._backward.run([*self._of_x, *self._cut], known_vars, values)
        return results[: len(self._of_x)], results[len(self._of_x) :]

    def weights(
        self, params: Any, rest: Any, x: Any, residuals: Sequence[Any], cut: Sequence[Any]
    ) -> list[Any]:
        """The gradients of ``params``."""
        flat = self._inputs.flatten_up_to((params, rest, x))
        inputs, values = [*self._forward_inputs, *self._cut], [*flat, *residuals, *cut]
        return self._backward.run(self._of_params, inputs, values)


class _Equations:
    """A function of flat values as equations, those of calls among them."""

    def __init__(self, function: Callable[..., Any], shapes: Sequence[Any]) -> None:
        traced = jax.make_jaxpr(function)(*shapes)
        closed = jax.make_jaxpr(lambda *flat: _inlined(traced, flat))(*shapes)
        jaxpr = closed.jaxpr
        self.ins, self.outs, self.eqns = list(jaxpr.invars), list(jaxpr.outvars), jaxpr.eqns
        self._constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._maker = {var: n for n, eqn in enumerate(self.eqns) for var in eqn.outvars}

    def run(
        self, outputs: Sequence[Any], inputs: Sequence[Var], values: Sequence[Any]
    ) -> list[Any]:
        """The values of variables, from those that are given."""
        value_of = {**self._constants, **dict(zip(inputs, values, strict=True))}
        for number in self._slice(outputs, value_of):
            eqn = self.eqns[number]
            results = _compat.evaluate(eqn, read(eqn.invars, value_of))
            for var, value in zip(eqn.outvars, results, strict=True):
                value_of.setdefault(var, value)
        return read(outputs, value_of)

    def costly(self, outputs: Iterable[Any]) -> list[Var]:
        """The variables of least bytes that others are cheaply computed from, beside the arguments:
        results of products and the like, or what is made of several of them. Those that JAX would
        keep are such variables, so no more is kept than it does under ``jax.checkpoint``.
        """
        outputs = variables(outputs)
        begins = self.first_met(
            outputs, {var for eqn in self.eqns if not _is_cheap(eqn) for var in eqn.outvars}
        )
        follows: dict[Var, list[Var]] = {}
        for number in self._slice(outputs, begins):
            eqn = self.eqns[number]
            for var in variables(eqn.invars):
                follows.setdefault(var, []).extend(eqn.outvars)
        nodes = {*begins, *follows, *(v for after in follows.values() for v in after)}
        width = {var: _nbytes(var) for var in nodes}
        kept = narrowest(begins, [v for v in outputs if v in nodes], follows, width)
        return self.first_met(outputs, kept)

    def first_met(self, outputs: Iterable[Any], stops: set[Var]) -> list[Var]:
        """Which of ``stops`` the equations for ``outputs`` read first."""
        result: dict[Var, None] = {}
        for number in (None, *self._slice(outputs, stops)):
            atoms = outputs if number is None else self.eqns[number].invars
            result |= dict.fromkeys(var for var in variables(atoms) if var in stops)
        return list(result)

    def made_for(self, outputs: Iterable[Any]) -> set[Var]:
        """All that is computed on the way to these variables."""
        return {var for number in self._slice(outputs, ()) for var in self.eqns[number].outvars}

    def _slice(self, outputs: Iterable[Any], stops: Container[Var]) -> list[int]:
        return needed_behind(self.eqns, self._maker, outputs, stops)


def _inlined(called: Any, flat: Sequence[Any]) -> list[Any]:
    return evaluated(opened(called), getattr(called, "consts", ()), flat, _without_call)


def _without_call(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    inner = {} if eqn.primitive.name in LOOPS else inner_jaxprs(eqn)
    calls = [jaxpr for jaxprs in inner.values() for jaxpr in jaxprs]
    return _inlined(calls[0], operands) if calls else _compat.evaluate(eqn, operands)


def _is_cheap(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name in TABLE and name not in _DRAWS and equation_flops(eqn) == 0


def _nbytes(var: Var) -> int:
    is_key = not hasattr(var.aval.dtype, "itemsize")
    return math.prod(var.aval.shape) * (16 if is_key else var.aval.dtype.itemsize)


def _shape(atom: Any) -> Any:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
