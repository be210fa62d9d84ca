"""Training a case on one device, on one device with noise, and under a mesh; all that is seen."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat
from ..arrays.values import as_numpy
from ..errors import BatchError, LayoutError, ModelError
from ..jaxprs.edits import equations
from ..layouts.params import ParamInfo
from ..layouts.placement import Placement
from ..planning.faults import tracing
from ..program import Program, TrainState
from ..run import Trainer
from ..step.options import StepOptions
from .cases import Build, Case, Setup, case_of
from .judging import Run, Tolerance

_RTOL = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3}  # coarser ones: four times their eps
_REPETITIONS = 3

Take = Callable[[TrainState, Any], tuple[TrainState, Any]]


class OneDevice:
    """The oracle: the program as it is, taken step by step on one device, with nothing of ours."""

    def __init__(self, build: Build, seed: int, double: bool, **more: Any) -> None:
        self.case = _built(build, seed, double, contextlib.nullcontext(), **more)
        self._program = program = _plain_program(self.case)
        self.name = program.name
        self.is_pure = isinstance(self.case.model, Program)
        self._start = jax.jit(program.initial)() if self.is_pure else program.initial()
        self._step = jax.jit(program.own_step or _plain_step(program))
        with tracing(self.name):
            self._gradients = self._gradient_step()

    def run(self, steps: int) -> Run:
        """Train. Raises :class:`ModelError` if the loss does not stay finite."""
        run = self._run(self._start, self.case.batches, steps)
        wrong = [i for i, loss in enumerate(run.losses, start=1) if not math.isfinite(loss)]
        if wrong:
            raise ModelError(
                f"the loss of step {wrong[0]} is {run.losses[wrong[0] - 1]} on one device already, "
                "so meshes cannot be compared with it. Lower the learning rate, or check the batch."
            )
        return run

    def run_again(self, steps: int, eps: float, seed: int) -> list[Run]:
        """Train from parameters, and on batches, that differ by about one rounding."""
        draws = [np.random.default_rng([seed, number]) for number in range(_REPETITIONS)]
        return [
            self._run(
                self._start._replace(params=_shaken(self._start.params, eps, draw)),
                [_shaken(batch, eps, draw) for batch in self.case.batches],
                steps,
            )
            for draw in draws
        ]

    def tolerance(self, rtol: float | None) -> Tolerance:
        """What the coarsest float of the training step allows, unless ``rtol`` is given."""
        jaxpr = jax.make_jaxpr(self._program.own_step or _plain_step(self._program))
        with tracing(self.name):
            dtypes = _floats(jaxpr(self._start, self.case.batches[0]))
        eps, name = max((float(jnp.finfo(dtype).eps), str(dtype)) for dtype in dtypes)
        return Tolerance(_RTOL.get(name, 4 * eps) if rtol is None else rtol, name, eps)

    def _gradient_step(self) -> Take | None:
        if self.is_pure:
            telling = replace(self._program, update=_gradients_as_parameters, loss_slot=None)
            return None if telling.own_step is not None else jax.jit(_plain_step(telling))
        step = self._program.own_step or _plain_step(self._program)
        return _gradient_step(step, self.case.model, self._start, self.case.batches[0])

    def _run(self, state: TrainState, batches: Any, steps: int) -> Run:
        infos = self._program.infos
        values, losses, gradients = [_values(infos, state)], [], None
        if self._gradients is not None:
            gradients = self._gradients(state, batches[0])[0].params
        for batch in itertools.islice(itertools.cycle(batches), steps):
            state, logs = self._step(state, batch)
            values.append(_values(infos, state))
            losses += _loss(logs)
        return _as_run(infos, gradients, values, losses)


def under_mesh(
    build: Build, setup: Setup, seed: int, double: bool, steps: int, oracle: OneDevice, **more: Any
) -> Run:
    """Train as a user would: the model built under the strategy, its own step, its own batches."""
    if oracle.is_pure:
        case = _built(build, seed, double, contextlib.nullcontext(), **more)
        _check_batches(case, oracle.case)
        return _run_pure(case, setup, steps)
    strategy = _strategy(setup)
    case = _built(build, seed, double, strategy.scope(), strategy, **more)
    _check_batches(case, oracle.case)
    return _run_keras(case, setup, strategy, steps)


def _check_values(case: Case) -> None:
    """Raise :class:`BatchError` for a batch of shapes, by which a dry run can be made."""
    for value in jax.tree.leaves(case.batches):
        if isinstance(value, jax.ShapeDtypeStruct):
            raise BatchError(
                f"build() returned a batch with {value.dtype} of shape {value.shape}, without "
                "values. Meshes are compared by training: return arrays, drawn by a generator of a "
                "fixed seed. Dry runs and plans take them, too."
            )


def _check_batches(case: Case, first: Case) -> None:
    """Refuse to compare what was trained on other data."""
    arrays, before = (list(map(as_numpy, jax.tree.leaves(of.batches))) for of in (case, first))
    pairs = zip(arrays, before, strict=False)
    same = all(one.shape == two.shape and one.tobytes() == two.tobytes() for one, two in pairs)
    if not same or len(arrays) != len(before):
        raise ModelError(
            "build() returned another batch than for one device. It is called once for each mesh "
            "and must return the same data on every call: draw them inside of it, by a generator "
            "of a fixed seed."
        )


def _run_keras(case: Case, setup: Setup, strategy: Any, num_steps: int) -> Run:
    from ..frontends.keras.compiled import functions_of
    from ..frontends.keras.program import KerasVariables

    model = case.model
    start = strategy.state(model, case.batches[0])
    steps = strategy._steps(model, case.batches[0])
    program = functions_of(strategy.unstaged, model, strategy.prepare(model)).steps.program
    infos = program.infos  # under their own paths

    def now() -> tuple[np.ndarray, ...]:
        # As the variables show it: a state may be stored in another form.
        return tuple(as_numpy(_compat.raw_value(v)) for v in KerasVariables.of(model).all)

    values, losses, gradients = [now()], [], None

    def put(batch: Any) -> Any:
        return _in_parts(batch, setup, lambda part: strategy.put(part, model))

    first = put(case.batches[0])
    gradient_step = _gradient_step(steps.train_step, model, start, first)
    if gradient_step is not None:
        params = gradient_step(start, first)[0].params
        strategy.load_state(model, start._replace(params=params))
        gradients = dict(zip([info.path for info in program.params], now(), strict=False))
        strategy.load_state(model, start)
    state = start
    for batch in itertools.islice(itertools.cycle(case.batches), num_steps):
        state, logs = steps.train(state, put(batch))  # as fit takes it
        strategy.load_state(model, state)
        state = strategy.state(model)  # in its layout again
        values.append(now())
        losses += _loss(logs)
    return _as_run(infos, gradients, values, losses)


def _run_pure(case: Case, setup: Setup, steps: int) -> Run:
    program: Program = case.model
    placement, how = _pure(setup)

    def trainer(program: Program) -> Any:
        return Trainer(program, placement, how)

    true = trainer(program)
    gradients = None
    if program.own_step is None:
        telling = trainer(replace(program, update=_gradients_as_parameters, loss_slot=None))
        first = _in_parts(case.batches[0], setup, telling.put)
        gradients = telling.unpadded(telling.step(telling.init(), first)[0]).params
    state = true.init()
    values, losses = [_values(program.infos, true.unpadded(state))], []
    for batch in itertools.islice(itertools.cycle(case.batches), steps):
        state, logs = true.step(state, _in_parts(batch, setup, true.put))
        values.append(_values(program.infos, true.unpadded(state)))
        # With accumulation, a program's logs are those of its last micro-batch.
        losses += _loss(logs) if how.batches == 1 else []
    return _as_run(program.infos, gradients, values, losses)


def _in_parts(batch: Any, setup: Setup, put: Callable[[Any], Any]) -> Any:
    """The batch as a step takes it: the micro-batches that it accumulates, or itself."""
    parts = setup.options.get("accumulate", 1)
    if parts == 1:
        return put(batch)
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % parts:
        raise BatchError(
            f"a batch of {rows} rows does not make {parts} micro-batches of the same size; take "
            f"{rows // parts * parts or parts}."
        )
    size = rows // parts

    def part(number: int) -> Any:
        return jax.tree.map(lambda a: a[number * size : (number + 1) * size], batch)

    return tuple(put(part(number)) for number in range(parts))


# Building


def _built(
    build: Build,
    seed: int,
    double: bool,
    scope: Any,
    strategy: Any = None,
    layouts: Any = None,
    options: Any = None,
) -> Case:
    """What ``build`` returns: always from the same seed, always with the same names."""
    import keras

    from ..frontends.keras.hooks import Hooks
    from ..frontends.keras.options import check_compiled

    _compat.install_keras_hooks(Hooks())  # idle outside a scope, but for the names of slots
    with _compat.names_from_the_start():
        keras.utils.set_random_seed(seed)
        with scope:
            case = case_of(build(), layouts, options or {})
            _check_values(case)
        if double:
            case = replace(case, batch=[_widened(batch) for batch in case.batches])
        if isinstance(case.model, Program):
            return case
        if not isinstance(case.model, keras.Model):
            raise ModelError(
                f"build() returned {reprlib.repr(case.model)} for a model; it must be a compiled "
                "Keras model or a Program."
            )
        check_compiled(case.model)
        if strategy is not None:
            strategy.prepare(case.model, lambda: case.batches[0])
        elif _compat.needs_batch_to_build(case.model) or _compat.has_unbuilt_optimizer(case.model):
            with tracing(case.model.name):
                _compat.build_for(case.model, case.batches[0])
        return case


def placement_of(case: Case, setup: Setup) -> Placement:
    """Where a setup lays the model out. Raises :class:`LayoutError` for options that are none."""
    return _pure(setup)[0] if isinstance(case.model, Program) else _strategy(setup).placement


def _pure(setup: Setup) -> tuple[Placement, StepOptions]:
    ways = _arguments(StepOptions)
    _refuse_unknown(setup.options, _arguments(Placement.of) | ways, "Placement and StepOptions")
    options = {k: v for k, v in setup.options.items() if k not in ways}
    how = StepOptions(**{k: v for k, v in setup.options.items() if k in ways})
    return Placement.of(setup.mesh, setup.layouts, **options), how


def _strategy(setup: Setup) -> Any:
    from ..frontends.keras import Sharded

    _refuse_unknown(setup.options, _arguments(Sharded), "The arguments of Sharded")
    return Sharded(setup.mesh, setup.layouts, **setup.options)


def _arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "mesh", "layouts"}


def _refuse_unknown(options: Mapping[str, Any], allowed: set[str], name: str) -> None:
    if unknown := sorted(options.keys() - allowed):
        raise LayoutError(
            f"{name} take no option {', '.join(map(repr, unknown))}; the options are "
            f"{', '.join(sorted(allowed))}."
        )


def _plain_program(case: Case) -> Program:
    if isinstance(case.model, Program):
        return case.model
    from ..frontends.keras.program import KerasVariables, keras_program

    return keras_program(case.model, KerasVariables.of(case.model))


# Steps and gradients


def _plain_step(program: Program) -> Take:
    def step(whole: TrainState, batch: Any) -> tuple[TrainState, Any]:
        differentiate = jax.value_and_grad(program.loss, has_aux=True)
        (_, aux), grads = differentiate(whole.params, whole, batch, True)
        slots = program.noting(whole.slots, aux.loss)
        params, slots = program.update(whole.params, grads, slots)
        metrics, logs = program.measure(aux.metrics, aux, batch)
        return TrainState(params, aux.state, slots, metrics), logs

    return step


def _gradients_as_parameters(params: Any, grads: Any, slots: Any) -> tuple[Any, Any]:
    """In place of the optimizer: the step that would be taken hands its gradients out."""
    del params
    return grads, slots


def _gradient_step(step: Take, model: Any, state: TrainState, batch: Any) -> Take | None:
    """The training step compiled so that its new parameters are its gradients.

    ``None`` for a model that brings its own step and does not ask its optimizer through
    ``stateless_apply``, where the gradients can be seen.
    """
    with _instead_of_update(model.optimizer) as calls:
        compiled = jax.jit(step).lower(state, batch).compile()
    if _compat.has_own(model, "train_step"):
        # JAX keeps what it traced, by function: the step itself would then not update either.
        jax.clear_caches()
    return compiled if calls else None


@contextlib.contextmanager
def _instead_of_update(optimizer: Any) -> Iterator[list[bool]]:
    calls: list[bool] = []

    def instead(slots: Any, grads: Any, params: Any) -> tuple[Any, Any]:
        calls.append(True)
        return [g if g is not None else jnp.zeros_like(p) for g, p in zip(grads, params)], slots  # noqa: B905

    optimizer.stateless_apply = instead
    try:
        yield calls
    finally:
        del optimizer.stateless_apply


# Reading


def _as_run(
    infos: tuple[ParamInfo, ...], gradients: Any, values: list[Any], losses: list[float]
) -> Run:
    by_path = gradients or {}
    return Run(
        tuple((info.path, info.role) for info in infos),
        tuple(values),
        tuple(as_numpy(by_path[i.path]) if i.path in by_path else None for i in infos),
        tuple(losses),
    )


def _values(infos: tuple[ParamInfo, ...], state: TrainState) -> tuple[np.ndarray, ...]:
    merged = [(part, path) for part in state for path in part]
    by_path = {path: part[path] for part, path in merged}
    return tuple(as_numpy(by_path[info.path]) for info in infos)


def _loss(logs: Any) -> list[float]:
    """The loss of a step; none where a model's own step has no log of that name, as a GAN's."""
    return [float(np.asarray(logs["loss"]))] if "loss" in logs else []


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _shaken(tree: Any, eps: float, draw: np.random.Generator) -> Any:
    """The tree with each real or complex element changed by up to ``eps`` of itself."""

    def shaken(leaf: Any) -> Any:
        if not _is_inexact(leaf):
            return leaf
        leaf = np.asarray(leaf)
        return (leaf * (1 + eps * draw.uniform(-1, 1, leaf.shape))).astype(leaf.dtype)

    return jax.tree.map(shaken, tree)


def _widened(batch: Any) -> Any:
    def wide(leaf: Any) -> Any:
        if not _is_inexact(leaf):
            return leaf
        is_complex = jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating)
        return np.asarray(leaf, np.complex128 if is_complex else np.float64)

    return jax.tree.map(wide, batch)


def _floats(jaxpr: Any) -> set[Any]:
    """The float dtypes of all that a jaxpr computes; of complex numbers, those of their parts."""
    names = set()
    for eqn in equations(jaxpr):
        for var in eqn.outvars:
            dtype = getattr(var.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                names.add(jnp.dtype(jnp.finfo(dtype).dtype))
    return names or {jnp.dtype("float32")}
