"""Look-ups along split dims within stages, which XLA compiles in few forms."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import _compat
from meshwright.jaxprs import reach
from meshwright.stages import lookups

WORDS = np.random.default_rng(1).integers(0, 16, [16, 4])
LAYOUTS = {"table": ["model", None], "head": [None, "model"]}


def program() -> mw.Program:
    """A table of words before four equal blocks, and the scores of words after them."""
    draw = np.random.default_rng(0)
    params = {"table": draw.normal(size=[16, 8]).astype("float32")}
    params["head"] = draw.normal(size=[8, 16]).astype("float32")
    params |= {f"w{n}": draw.normal(size=[8, 8]).astype("float32") / 3 for n in range(4)}

    def loss(params: Any, words: Any) -> Any:
        x = jnp.take(params["table"].astype("float32"), words, axis=0)
        for n in range(4):
            x = x + jnp.tanh(x @ params[f"w{n}"])
        scores = jax.nn.log_softmax(x @ params["head"])
        return -jnp.mean(jnp.take_along_axis(scores, words[..., None], axis=-1))

    return mw.jax_program(loss, params, optax.sgd(0.1), batch=WORDS)


def stepped(axes: dict[str, int], **how: Any) -> tuple[dict[str, Any], float]:
    mesh = mw.create_mesh(axes, devices=jax.devices()[: np.prod(list(axes.values()))])
    placement = mw.Placement.of(mesh, batch="data", layouts=how.pop("layouts", {}))
    trainer = mw.Trainer(program(), placement, mw.StepOptions(**how))
    state, logs = trainer.step(trainer.init(), trainer.put(WORDS))
    params = trainer.unpadded(state).params
    return {path: np.asarray(value) for path, value in params.items()}, float(logs["loss"])


@pytest.mark.parametrize("aborts", [True, False], ids=["whole table", "split table"])
def test_look_ups_along_split_dims_are_those_of_one_device(
    aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not aborts and _compat.aborts_on_split_tables():
        pytest.skip("the XLA of this JAX ends the process")
    monkeypatch.setattr(_compat, "aborts_on_split_tables", lambda: aborts)
    whole: list[Any] = []
    lay = lookups.constraint_on
    monkeypatch.setattr(lookups, "constraint_on", lambda *of: whole.append(of) or lay(*of))
    expected, loss = stepped({"data": 1})
    how = {"pipeline": mw.Pipeline("stage", 4), "layouts": LAYOUTS}
    result, same = stepped({"stage": 2, "data": 2, "model": 2}, **how)
    assert {value.aval.ndim for value, *_ in whole} == ({2, 3} if aborts else {3})
    assert same == pytest.approx(loss, rel=1e-6)
    for path, value in expected.items():
        np.testing.assert_allclose(result[path], value, atol=1e-6, err_msg=path)


@pytest.mark.filterwarnings("ignore:micro_batches=1")  # with more, rows meet in each by itself
@pytest.mark.parametrize("widths", [(8, 8, 8, 8), (8, 6, 10, 8)], ids=["equal", "differing"])
def test_rows_that_move_along_the_batch_wait_for_no_other_stage(widths: tuple[int, ...]) -> None:
    """XLA's permutes wait for all devices of the mesh: the process hung, and was aborted."""
    draw = np.random.default_rng(0)
    rows, sizes = draw.normal(size=[16, 8]).astype("float32"), [8, *widths]
    params = {
        f"w{n}": draw.normal(size=pair).astype("float32") / 3
        for n, pair in enumerate(itertools.pairwise(sizes))
    }

    def loss(params: Any, x: Any) -> Any:
        for n in range(4):
            x = jnp.tanh(x @ params[f"w{n}"])
            x = x + jnp.flip(x, 0) / 2 if n == 1 else x
        views = jnp.concatenate([x, jnp.roll(x, 1, axis=0)])
        windows = jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME")
        return jnp.mean((views[1:] - views[:-1]) ** 2) + jnp.mean(jnp.pad(windows, [(1, 0)] * 2))

    program = mw.jax_program(loss, params, optax.sgd(0.5), batch=rows)
    results = []
    for axes, stages in [({"data": 1}, None), ({"stage": 2, "data": 4}, mw.Pipeline("stage", 1))]:
        mesh = mw.create_mesh(axes, devices=jax.devices()[: np.prod(list(axes.values()))])
        options = mw.StepOptions(pipeline=stages)
        trainer = mw.Trainer(program, mw.Placement.of(mesh, batch="data"), options)
        state, logs = trainer.step(trainer.init(), trainer.put(rows))
        results.append((logs["loss"], dict(trainer.unpadded(state).params)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *results[::-1])


def _last(x: Any, by: int) -> Any:
    return jnp.roll(x, by, axis=-1)


IN_BLOCKS = {
    "roll": lambda x: _last(x, 1),
    "roll in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: 0.9 * _last(y, 1), x),
    "roll in a loop by value": lambda x: (
        jax.lax.while_loop(
            lambda y: jnp.sum(y**2) > 0.1,
            lambda y: 0.5 * _last(y, 1),
            jax.lax.stop_gradient(x),
        )
        + x
    ),
    "flip in a branch": lambda x: jax.lax.cond(
        jnp.sum(x) > 0, lambda y: jnp.flip(y, -1), lambda y: 2 * y, x
    ),
    "sort": lambda x: jnp.sort(x, -1),
    "sort rows": lambda x: jnp.sort(x, 0),
    "rows in another order": lambda x: x[jnp.argsort(x[:, 0])],
    "solve": lambda x: jnp.linalg.solve(jnp.eye(8) + 0.1 * x.T @ x, x.T).T,
    "top_k": lambda x: jnp.tile(jax.lax.top_k(x, 4)[0], 2),
    "set": lambda x: x.at[:, jnp.array([3, 7])].set(0.5),
    "segments": lambda x: jax.ops.segment_sum(x.T, jnp.arange(8) // 2, 8).T,
}


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_what_moves_along_a_dim_that_is_split_in_a_stage_is_that_of_one_device(name: str) -> None:
    """XLA ended the process, or its permutes waited for stages that took another branch."""
    draw = np.random.default_rng(0)
    batch = draw.normal(size=[8, 8]).astype("float32")
    params = {f"w{n}": draw.normal(size=[8, 8]).astype("float32") / 3 for n in range(4)}

    def loss(params: Any, x: Any) -> Any:
        for n in range(2):
            hidden = IN_BLOCKS[name](jnp.tanh(x @ params[f"w{2 * n}"]))
            x = x + hidden @ params[f"w{2 * n + 1}"]
        return jnp.mean(x**2)

    program = mw.jax_program(loss, params, optax.sgd(0.5), batch=batch)
    layouts = {"w[02]": [None, "model"], "w[13]": ["model", None]}
    one = mw.create_mesh({"data": 1}, devices=jax.devices()[:1])
    alone = mw.Trainer(program, mw.Placement.of(one, batch="data"), mw.StepOptions(accumulate=2))
    state, logs = alone.step(alone.init(), (batch[:4], batch[4:]))
    mesh = mw.create_mesh({"stage": 2, "data": 2, "model": 2})
    options = mw.StepOptions(pipeline=mw.Pipeline("stage", 2))
    staged = mw.Trainer(program, mw.Placement.of(mesh, layouts, batch="data"), options)
    result, staged_logs = staged.step(staged.init(), staged.put(batch))
    assert float(staged_logs["loss"]) == pytest.approx(float(logs["loss"]), rel=1e-5)
    expected, actual = dict(state.params), dict(staged.unpadded(result).params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), actual, expected)


@pytest.mark.parametrize(
    ("pick", "whole"),
    [
        (lambda x, places: x[jnp.arange(4), places], set()),  # each row its own score
        (lambda x, places: x[places], {"data"}),  # rows of pieces that another axis splits
    ],
)
def test_rows_are_whole_where_they_are_found_across_another_axis(pick: Any, whole: set) -> None:
    shapes = jax.ShapeDtypeStruct([4, 6], "float32"), jax.ShapeDtypeStruct([4], "int32")
    jaxpr = jax.make_jaxpr(pick)(*shapes).jaxpr
    rows, columns = (("data", 2),), (("model", 2),)
    scope = reach.follow(jaxpr, [[rows, columns], [rows]])
    found = [
        lookups._axes_along(lookups._looked_across, eqn, scope, scope.inner.get(number))
        for number, eqn in enumerate(jaxpr.eqns)
    ]
    assert set().union(*found) == whole
