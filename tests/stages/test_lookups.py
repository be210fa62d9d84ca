"""Look-ups in tables with split rows, in the form that the XLA of JAX 0.11 needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import _compat
from meshwright.stages import lookups

WORDS = np.random.default_rng(1).integers(0, 16, [16, 4])


def program() -> mw.Program:
    """A table of words before four equal blocks."""
    draw = np.random.default_rng(0)
    params = {"table": draw.normal(size=[16, 8]).astype("float32")}
    params |= {f"w{n}": draw.normal(size=[8, 8]).astype("float32") / 3 for n in range(4)}

    def loss(params: Any, words: Any) -> Any:
        x = jnp.take(params["table"].astype("float32"), words, axis=0)
        for n in range(4):
            x = x + jnp.tanh(x @ params[f"w{n}"])
        return jnp.mean(x**2)

    return mw.jax_program(loss, params, optax.sgd(0.1), batch=WORDS)


def stepped(axes: dict[str, int], **how: Any) -> tuple[dict[str, Any], float]:
    mesh = mw.create_mesh(axes, devices=jax.devices()[: np.prod(list(axes.values()))])
    placement = mw.Placement.of(mesh, batch="data", layouts=how.pop("layouts", {}))
    trainer = mw.Trainer(program(), placement, mw.StepOptions(**how))
    state, logs = trainer.step(trainer.init(), trainer.put(WORDS))
    params = trainer.unpadded(state).params
    return {path: np.asarray(value) for path, value in params.items()}, float(logs["loss"])


@pytest.mark.parametrize("aborts", [True, False], ids=["whole", "split"])
def test_rows_of_a_split_table_are_those_of_one_device(
    aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not aborts and _compat.aborts_on_split_lookups():
        pytest.skip("the XLA of this JAX ends the process")
    monkeypatch.setattr(_compat, "aborts_on_split_lookups", lambda: aborts)
    whole: list[Any] = []
    lay = lookups.constraint_on
    monkeypatch.setattr(lookups, "constraint_on", lambda *of: whole.append(of) or lay(*of))
    expected, loss = stepped({"data": 1})
    how = {"pipeline": mw.Pipeline("stage", 4), "layouts": {"table": ["model", None]}}
    result, same = stepped({"stage": 2, "data": 2, "model": 2}, **how)
    assert bool(whole) == aborts
    assert same == pytest.approx(loss, rel=1e-6)
    for path, value in expected.items():
        np.testing.assert_allclose(result[path], value, atol=1e-6, err_msg=path)
