"""What tests of programs on a mesh need: is it one device's, do trees agree, a process afresh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .arrays.values import as_numpy
from .equivalence import Case as Case
from .equivalence import Equivalence as Equivalence
from .equivalence import check
from .layouts.mesh import Mesh

# What Meshwright or an earlier test has settled in this process, and a fresh one settles anew.
_SETTLED = re.compile(r"NPROC|XLA_FLAGS|KERAS_BACKEND|JAX_NUM_CPU_DEVICES")


class Difference(NamedTuple):
    """One leaf in which two trees differ.

    >>> print(Difference("['w']", "differs by 0.5", 0.5))
    ['w']: differs by 0.5
    """

    path: str
    what: str
    largest: float = float("inf")  # largest absolute difference of two elements

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def assert_equivalent(
    build: Callable[[], Any],
    meshes: Sequence[Mesh | Mapping[str, int] | str] | Mesh | Mapping[str, int] | str,
    layouts: Mapping[str, Any] | None = None,
    *,
    steps: int = 5,
    seed: int = 0,
    rtol: float | None = None,
    double: bool = False,
    **options: Any,
) -> Equivalence:
    """Check that a model trains under each mesh as it does on one device.

    ``build()`` is called once per mesh, always with the same random seed. It returns ``(model,
    batch)``, ``(model, batch, layouts)`` or a :class:`Case`: a compiled Keras model with ``(x, y)``
    arrays, or a :class:`~meshwright.Program` with what its loss takes. ``layouts`` and ``options``
    go to :class:`~meshwright.Sharded`; an axis that one of the meshes does not have splits nothing
    there. One device is trained for ``steps`` steps by the plain gradient of the loss and the
    optimizer; the others take the strategy's own step.

    All variables are compared after every step, the gradients of the first one, and the losses.
    Allowed are ``rtol`` (by default what the coarsest float of the step allows) of a variable's
    largest gradient, or largest change, and 100 times what a change in the last bit of the
    parameters does on one device. ``double=True`` does it all in float64, which leaves no doubt.

    Returns the :class:`~meshwright.equivalence.Equivalence`; raises :class:`AssertionError` with
    its table if something went beyond tolerance.

    >>> import optax, meshwright as mw
    >>> def build():
    ...     def loss(params, batch):
    ...         return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    ...     program = mw.jax_program(loss, {"w": np.zeros([4, 2])}, optax.sgd(0.1))
    ...     return program, {"x": np.eye(8, 4), "y": np.ones([8, 2])}
    >>> result = assert_equivalent(build, ["batch=8", "batch=4,model=2"], {"w": [None, "model"]})
    >>> result.equal, result.meshes[0]["w"].gradient.excess < 1
    (True, True)
    """
    result = check(
        build, meshes, layouts, steps=steps, seed=seed, rtol=rtol, double=double, **options
    )
    if not result.equal:
        raise AssertionError(str(result))
    return result


def tree_allclose(actual: Any, expected: Any, rtol: float = 1e-6, atol: float = 0.0) -> bool:
    """Check that two trees of arrays agree; the error lists every leaf that does not.

    Elements agree where ``|actual - expected| <= atol + rtol * |expected|``, leaves that are not
    floating or complex where they are equal. Layouts, meshes and dtypes may differ. Returns
    ``True``, so that it may stand in an ``assert``; raises :class:`AssertionError`.

    >>> tree_allclose({"a": np.ones(3)}, {"a": np.ones(3) + 1e-9})
    True
    >>> tree_allclose({"a": np.ones(3), "b": 1}, {"a": np.array([1, 1, 3.0]), "b": 1})
    Traceback (most recent call last):
        ...
    AssertionError: 1 of 2 leaves differ (rtol=1e-06, atol=0.0):
      ['a']: 1 of 3 elements differ, most at (2,): 1.0 and 3.0, by 2 (relative 0.667)
    """
    differences = tree_differences(actual, expected, rtol, atol)
    if differences:
        leaves = len({*_leaves(actual), *_leaves(expected)})
        raise AssertionError(
            f"{len(differences)} of {leaves} leaves differ (rtol={rtol}, atol={atol}):\n"
            + "\n".join(f"  {difference}" for difference in differences)
        )
    return True


def tree_differences(
    actual: Any, expected: Any, rtol: float = 1e-6, atol: float = 0.0
) -> list[Difference]:
    """The leaves in which two trees differ, as data; see :func:`tree_allclose`.

    >>> tree_differences([1.0, 2.0], [1.0, 2.5])[0].largest
    0.5
    """
    left, right = _leaves(actual), _leaves(expected)
    differences = []
    for path in {**left, **right}:
        if path not in left or path not in right:
            side = "expected" if path in right else "actual"
            differences.append(Difference(path, f"is only in the {side} tree"))
            continue
        difference = _difference(path, as_numpy(left[path]), as_numpy(right[path]), rtol, atol)
        differences += [difference] if difference else []
    return differences


def run_in_fresh_process(
    code: str, env: Mapping[str, str] | None = None, timeout_s: float = 300.0
) -> str:
    """Run Python code in a new interpreter and return what it printed.

    A process settles its devices once, so whatever needs other ones needs another process. The new
    one inherits the environment, without the variables that choose devices and backend; ``env``
    adds to it. Raises :class:`AssertionError` with the process's own words if it fails, and
    :class:`subprocess.TimeoutExpired` after ``timeout_s``.

    >>> run_in_fresh_process('''
    ...     import meshwright as mw
    ...     mw.virtual_devices(2)
    ...     print(mw.create_mesh())
    ... ''')
    'x=2 @ cpu:0-1\\n'
    """
    inherited = {k: v for k, v in os.environ.items() if not _SETTLED.fullmatch(k)}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**inherited, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if process.returncode:
        raise AssertionError(
            f"the fresh process ended with status {process.returncode}.\n"
            f"{process.stdout}{process.stderr}"
        )
    return process.stdout


def _leaves(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path) or "the array": leaf for path, leaf in leaves}


def _difference(
    path: str, left: np.ndarray, right: np.ndarray, rtol: float, atol: float
) -> Difference | None:
    if left.shape != right.shape:
        return Difference(path, f"has dims {left.shape}, expected {right.shape}")
    gaps = _gaps(left, right)
    if _is(left, jnp.inexact) or _is(right, jnp.inexact):
        # An infinite tolerance, of an infinite element, forgives nothing; NaN is never close.
        wrong = ~(np.isfinite(gaps) & (gaps <= atol + rtol * np.abs(_wide(right))))
    else:
        wrong = np.asarray(left != right)
    if not wrong.any():
        return None
    at = np.unravel_index(
        np.argmax(np.where(wrong, np.nan_to_num(gaps, nan=np.inf), -1)), gaps.shape
    )
    return Difference(path, _in_words(left, right, gaps, wrong, at), float(gaps[at]))


def _in_words(
    left: np.ndarray, right: np.ndarray, gaps: np.ndarray, wrong: np.ndarray, at: tuple[Any, ...]
) -> str:
    where = f" at {tuple(map(int, at))}" if at else ""
    words = (
        f"{wrong.sum()} of {wrong.size} elements differ, most{where}: {left[at]} and {right[at]}"
    )
    if not np.isfinite(gaps[at]):
        return words
    with np.errstate(divide="ignore"):
        relative = gaps[at] / np.abs(_wide(right)[at])
    return f"{words}, by {gaps[at]:.3g} (relative {relative:.3g})"


def _gaps(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    equal = np.asarray(left == right)
    if not (_is(left, jnp.number) and _is(right, jnp.number)):
        return np.where(equal, 0.0, np.inf)
    with np.errstate(invalid="ignore"):
        return np.where(equal, 0.0, np.abs(_wide(left) - _wide(right)))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(complex if _is(array, jnp.complexfloating) else float)


def _is(array: np.ndarray, kind: Any) -> bool:
    return jnp.issubdtype(array.dtype, kind)  # JAX's question knows bfloat16, NumPy's does not
