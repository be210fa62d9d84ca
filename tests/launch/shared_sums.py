"""A program for ``test_neighbors.py``: two processes of one device each train in both ways."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest

import meshwright as mw
from meshwright.launch.neighbors import neighbors
from meshwright.step import summing


def train(way: str) -> None:
    """Train, and print the losses of some epochs."""
    keras.utils.set_random_seed(3)
    strategy = mw.DataParallel(mw.create_mesh({"batch": -1}))
    with strategy.scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(5), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(64, 6)).astype("f"), draw.normal(size=(64, 1)).astype("f")
    losses = strategy.fit(model, x, y, batch_size=16, epochs=3, verbose=0).history["loss"]
    print(way, *(f"{loss:.6f}" for loss in losses), flush=True)


def sum_by_hand() -> None:
    """Sum arrays, check the sums, and leave the other process alone with the next ones."""
    mesh, group, rank = mw.create_mesh({"batch": -1}).jax_mesh, neighbors(), jax.process_index()
    assert group is not None
    lies = jax.NamedSharding(mesh, jax.P("batch"))
    draw = np.random.default_rng(1)
    values = {"a": draw.normal(size=(2, 7, 33)).astype("f"), "b": draw.normal(size=2).astype("f")}
    parts = {
        name: jax.make_array_from_process_local_data(lies, value[rank : rank + 1])
        for name, value in values.items()
    }
    add = jax.jit(lambda parts: summing.sum_flat(parts, mesh, ("batch",), summing.PLAIN_SUM))
    assert "meshwright_host_sum" in add.lower(parts).as_text()
    for name, total in add(parts).items():
        np.testing.assert_allclose(total, values[name].sum(0), rtol=1e-6, atol=1e-6)
    if rank == 1:
        group.close()
        return
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        jax.block_until_ready(add(parts))
    print("refused:", str(caught.value).partition("ConnectionError: ")[2], flush=True)


if __name__ == "__main__":
    train("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summing, "sums_on_host", lambda *_: False)
        train("apart")
    sum_by_hand()
