"""The laws that every operation of the named language obeys, as tables of cases.

A case is an operation, its operands' dims and the same thing in NumPy. Under every kind of rules
the values are NumPy's, and so is the gradient (the slope of NumPy's own function in double
precision); the result lies where the rules say; no operand is gathered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
import meshwright.named as mn

KINDS = ("none", "1-D", "2-D", "3-D")
# 3-D rules split every dim that the others do; those are asked in the long run.
USUAL = [pytest.param(kind, marks=[] if kind == "3-D" else pytest.mark.full) for kind in KINDS]
_AXES = {
    "1-D": {"all": 8},
    "2-D": {"rows": 4, "cols": 2},
    "3-D": {"rows": 2, "cols": 2, "planes": 2},
}


@dataclass(frozen=True)
class Case:
    """An operation ``named(*arrays)`` beside ``numpy(*arrays)``.

    ``dims`` are those of each operand. ``split`` are the names of dims to be split, the first of
    them also on meshes with fewer axes; those of them that the operation touches should be among
    them. ``more_rules`` lays further dims along the axes of these. ``gathers`` says why an operand
    is gathered, where it is documented. Operands are normal numbers unless ``make`` makes them.
    ``slopes`` are the operands that a gradient is taken of.
    """

    name: str
    named: Callable[..., Any]
    numpy: Callable[..., Any]
    dims: Sequence[str]
    split: Sequence[str]
    more_rules: Mapping[str, str] = field(default_factory=dict)
    gathers: str = ""
    make: Callable[[np.random.Generator], Sequence[Any]] | None = None
    slopes: Sequence[int] = (0,)
    tolerance: float = 2e-5
    slope_tolerance: float = 2e-3

    def __str__(self) -> str:
        return self.name

    def operands(self) -> list[np.ndarray]:
        random = np.random.default_rng(len(self.name))
        if self.make is not None:
            return [np.asarray(x) for x in self.make(random)]
        return [
            random.normal(size=[d.size for d in mn.as_dims(dims)]).astype("float32")
            for dims in self.dims
        ]

    def rules(self, kind: str) -> mn.BoundRules | None:
        """Rules of this kind: as many of ``split`` as the mesh has axes."""
        if kind == "none":
            return None
        axes = _AXES[kind]
        pairs = list(zip(self.split, axes, strict=False))
        pairs += [
            (dim, dict(pairs)[of]) for dim, of in self.more_rules.items() if of in dict(pairs)
        ]
        return mn.BoundRules(mn.DimRules(pairs), mw.create_mesh(axes))


def under_each_kind(case: Case, few: Collection[str]) -> list[Any]:
    """The case under every kind of rules; but for 3-D meshes and ``few``, in the long run alone."""
    return [
        pytest.param(
            case,
            kind,
            id=f"{case}-{kind}",
            marks=[] if kind == "3-D" or str(case) in few else pytest.mark.full,
        )
        for kind in KINDS
    ]


def scope(rules: mn.BoundRules | None) -> Any:
    return mn.no_rules() if rules is None else mn.rules(rules)


def _named(case: Case, arrays: Sequence[Any]) -> list[Any]:
    return [mn.named(x, dims) for x, dims in zip(arrays, case.dims, strict=True)]


def _leaves(result: Any) -> list[Any]:
    return jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, mn.NamedArray))


def check(case: Case, kind: str) -> None:
    """Every law for one case under one kind of rules."""
    rules = case.rules(kind)
    with scope(rules):
        operands = _named(case, case.operands())
        compiled = jax.jit(case.named).lower(*operands).compile()
        _check_values(case, compiled(*operands))
        if kind == "2-D":  # without jit as well
            _check_values(case, case.named(*operands))
        if rules is not None:
            _check_layout(case, rules, compiled, operands)
        if case.slopes:
            _check_gradients(case, operands)


def _check_values(case: Case, result: Any) -> None:
    """What the operation gives is what NumPy gives."""
    actual, expected = _leaves(result), _several(case.numpy(*case.operands()))
    assert len(actual) == len(expected)
    for one, other in zip(map(np.asarray, actual), expected, strict=True):
        assert one.shape == np.shape(other)
        np.testing.assert_allclose(one, other, rtol=case.tolerance, atol=case.tolerance)


def _check_layout(case: Case, rules: mn.BoundRules, compiled: Any, operands: Any) -> None:
    """Results lie where the rules say, and no operand is gathered."""
    for result in _leaves(compiled(*operands)):
        expected = rules.layout(result.dims).sharding
        lies = result.array.sharding
        assert lies.is_equivalent_to(expected, result.array.ndim), (lies, expected)
    gathers = re.findall(r"^.* all-gather(?:-start)?\(.*$", compiled.as_text(), re.MULTILINE)
    assert not gathers or case.gathers, gathers


def _check_gradients(case: Case, operands: list[mn.NamedArray]) -> None:
    """Along a random direction the gradient is the slope of NumPy's own function in doubles."""
    random = np.random.default_rng(1)
    doubles = [x.astype("float64") if x.dtype == np.float32 else x for x in case.operands()]
    results = _several(case.numpy(*doubles))
    floats = [i for i, x in enumerate(results) if np.asarray(x).dtype.kind == "f"]
    weights = {i: random.normal(size=np.shape(results[i])) for i in floats}
    ways = {i: random.normal(size=doubles[i].shape) for i in case.slopes}

    def numpy_at(t: float) -> float:
        moved = [x + t * ways[i] if i in ways else x for i, x in enumerate(doubles)]
        result = _several(case.numpy(*moved))
        return sum(float(np.sum(result[i] * weights[i])) for i in floats)

    def weighed(some: list[Any]) -> Any:
        moved = dict(zip(case.slopes, some, strict=True))
        result = _leaves(case.named(*(moved.get(i, x) for i, x in enumerate(operands))))
        return sum(jnp.sum(result[i].array * weights[i].astype("float32")) for i in floats)

    if not floats:
        return
    slope = (numpy_at(1e-6) - numpy_at(-1e-6)) / 2e-6
    grads = jax.jit(jax.grad(weighed))([operands[i] for i in case.slopes])
    actual = sum(
        float(np.sum(np.asarray(grad, "float64") * ways[i]))
        for i, grad in zip(case.slopes, grads, strict=True)
    )
    assert abs(actual - slope) <= case.slope_tolerance * max(abs(slope), 1.0), (actual, slope)


def _several(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def of_each(rows: Sequence[tuple[str, Any, str]]) -> Any:
    """The test for each row ``(name, call, says)`` of a table of what is refused."""
    return pytest.mark.parametrize(
        ("call", "says"), [row[1:] for row in rows], ids=[row[0] for row in rows]
    )


# Arrays that several modules take


def ones(dims: str) -> mn.NamedArray:
    """Ones of these dims."""
    return mn.named(jnp.ones([dim.size for dim in mn.as_dims(dims)]), dims)


def x8() -> mn.NamedArray:
    """The numbers from 0 to 63, as eight rows of eight."""
    return mn.named(np.arange(64, dtype="float32").reshape(8, 8), "a:8 b:8")
