"""Optimizers of Optax that see more than one array, or the loss, under layouts that split these."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.errors import ModelError

X = np.random.default_rng(0).normal(size=[4, 16, 64]).astype("float32")
SPLIT = {"first": [None, "model"], "blocks/.*": ["model", None]}
ROWS: dict[str, tuple[dict[str, int], Any, dict[str, Any]]] = {
    "split and shared out": ({"batch": 2, "model": 4}, SPLIT, {"zero": 3}),
    "accumulated": ({"batch": 4, "model": 2}, SPLIT, {"zero": 2, "accumulate": 2}),
    "in stages": ({"batch": 2, "stage": 2}, {}, {"pipeline": mw.Pipeline("stage", 8)}),
}
contrib = optax.contrib
READ_THE_LOSS: dict[str, Any] = {
    "plateau": optax.chain(optax.sgd(0.5), contrib.reduce_on_plateau(patience=0, rtol=0.5)),
    "momo": contrib.momo_adam(0.01),
    "polyak": optax.MultiSteps(optax.polyak_sgd(0.5), 2),
}
EVALUATE_AGAIN: dict[str, Any] = {
    "line search": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    "lbfgs": optax.lbfgs(),
    "sophia": contrib.sophia(0.01),
}
SEE_WHOLE_ARRAYS: dict[str, Any] = {
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=32),
    "lamb": optax.lamb(0.01),
    "muon": contrib.muon(0.01),
    "prodigy": contrib.prodigy(),
    "galore": contrib.galore(0.01, rank=8),
}


def loss(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["first"])
    for block in params["blocks"]:
        hidden = hidden + jnp.tanh(hidden @ block)
    return jnp.mean((hidden - 1) ** 2)


def parameters() -> Any:
    keys = jax.random.split(jax.random.key(0), 5)
    first, *blocks = (jax.random.normal(key, [64, 64]) / 16 for key in keys)
    return {"first": first, "blocks": blocks}


def alone(optimizer: Any) -> tuple[Any, list[float]]:
    """Parameters and losses by Optax itself, on one device."""
    params = parameters()
    state, losses = optimizer.init(params), []
    for x in X:
        value, grads = jax.value_and_grad(loss)(params, x)
        again = functools.partial(lambda x, params: loss(params, x), x)
        more: dict[str, Any] = {"value": value}
        if optimizer in (EVALUATE_AGAIN["line search"], EVALUATE_AGAIN["lbfgs"]):
            more |= {"grad": grads, "value_fn": again}
        if optimizer is EVALUATE_AGAIN["sophia"]:
            more = {"obj_fn": again}
        changes, state = optimizer.update(grads, state, params, **more)
        params = optax.apply_updates(params, changes)
        losses.append(float(value))
    return params, losses


def check(optimizer: Any, row: str) -> None:
    axes, layouts, options = ROWS[row]
    zero, accumulate = options.get("zero", 0), options.get("accumulate", 1)
    how = mw.StepOptions(accumulate=accumulate, pipeline=options.get("pipeline"))
    mesh = mw.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
    placement = mw.Placement.of(mesh, layouts, zero=zero)
    program = mw.jax_program(loss, parameters(), optimizer, batch=X[0])
    trainer = mw.Trainer(program, placement, how)
    state, losses = trainer.init(), []
    for x in X:
        state, logs = trainer.step(state, x if accumulate == 1 else (x[:8], x[8:]))
        losses.append(float(logs["loss"]))
    params, expected = alone(optimizer)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    actual = trainer.unpadded(state).params
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_allclose(actual[name], value, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("name", "row"), list(zip(READ_THE_LOSS, ROWS, strict=True)))
def test_an_optimizer_that_reads_the_loss_gets_that_of_the_whole_batch(name: str, row: str) -> None:
    check(READ_THE_LOSS[name], row)


@pytest.mark.full
@pytest.mark.parametrize("name", SEE_WHOLE_ARRAYS)
@pytest.mark.parametrize("row", ["split and shared out", "in stages"])
def test_an_optimizer_that_sees_whole_arrays_is_optax(name: str, row: str) -> None:
    check(SEE_WHOLE_ARRAYS[name], row)


def test_a_step_of_ones_own_that_forgets_the_loss_is_told_so() -> None:
    program = mw.jax_program(loss, parameters(), READ_THE_LOSS["plateau"])
    first = program.initial()
    with pytest.raises(ModelError, match=r"program\.noting\(slots, loss\)"):
        program.update(first.params, first.params, first.slots)
    new, slots = program.update(first.params, first.params, program.noting(first.slots, 0.5))
    assert new.keys() == first.params.keys()
    assert slots.keys() == first.slots.keys()


@pytest.mark.parametrize(
    "name", ["line search", *(pytest.param(n, marks=pytest.mark.full) for n in ("lbfgs", "sophia"))]
)
def test_an_optimizer_may_evaluate_the_loss_again(name: str) -> None:
    check(EVALUATE_AGAIN[name], "split and shared out")


@pytest.mark.parametrize(
    ("row", "words"),
    [("accumulated", "accumulate=2 is not supported with"), ("in stages", "cannot take the steps")],
)
def test_steps_in_parts_are_refused_where_the_loss_is_evaluated_again(row: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"{words}.* an optimizer that evaluates the loss again"):
        check(EVALUATE_AGAIN["line search"], row)


def test_a_plan_for_such_an_optimizer_is_one_that_it_can_train_by() -> None:
    """Micro-batches would take less memory, as they do with another optimizer."""
    shapes = jax.eval_shape(parameters)
    rows = jax.ShapeDtypeStruct((4096, 64), "float32")
    choices = {}
    for name, optimizer in {"again": EVALUATE_AGAIN["line search"], "plain": optax.sgd(1)}.items():
        program = mw.jax_program(loss, shapes, optimizer)
        plan = mw.plan(program, rows, target="h100:8", axes="batch=8", objective="memory")
        choices[name] = plan.accumulate, plan.remat
    assert choices["again"] == (1, "none")
    assert choices["plain"][0] > 1


def test_an_update_that_lacks_the_loss_says_where_it_gets_it() -> None:
    program = mw.jax_program(loss, parameters(), EVALUATE_AGAIN["line search"])
    first = program.initial()
    with pytest.raises(ModelError, match=r"call trainer\.step or program\.own_step"):
        program.update(first.params, first.params, first.slots)


def test_changes_of_other_shapes_are_refused() -> None:
    """As ``dpsgd`` makes them: it takes the first dim for that of rows, and sums over it."""
    sums = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g.sum(0), grads))
    program = mw.jax_program(loss, {"w": jnp.ones([4, 2])}, sums)
    first = program.initial()
    with pytest.raises(ModelError, match=r"w has shape \(4, 2\); received .* shape \(2,\)"):
        program.update(first.params, first.params, first.slots)


def slots_by_path(params: Any, optimizer: Any) -> dict[str, tuple[str, str]]:
    """How each slot that is not a scalar lies under ZeRO, and why."""
    program = mw.jax_program(lambda params, x: 0.0, params, optimizer)
    axes = {"batch": 4, "model": 2}
    placement = mw.Placement.of(mw.Mesh(axes), {".*": [None, "model"]}, zero=1)
    placed = [e for e in placement.place(program.infos) if e.info.role == "slot" and e.info.dims]
    return {e.info.path: (str(e.layout.unbound()), e.reason) for e in placed}


def test_slots_of_no_one_parameter_are_shared_out_too() -> None:
    params = {"a": jax.ShapeDtypeStruct((64, 128), "float32"), "b": jnp.zeros([64, 64])}
    of_all = "[batch]", "slot of several parameters, or of a part of one, zero=1"
    flat = slots_by_path(params, optax.flatten(optax.adam(0.1)))
    assert flat == {"0/mu": of_all, "0/nu": of_all}
    small = slots_by_path(params, optax.adafactor(0.1, min_dim_size_to_factor=64))
    assert small["0/v_row/a"] == ("[unsharded]", "slot: replicated")


def test_slots_of_a_lone_array_lie_as_it_does() -> None:
    slots = slots_by_path(jax.ShapeDtypeStruct((64, 128), "float32"), optax.adam(0.1))
    assert slots["0/mu"] == ("[batch, model]", "slot of params, zero=1")
