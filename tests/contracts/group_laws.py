"""What each process of a group runs: the core table on eight devices, against its own one device.

``python group_laws.py LAW ROW...`` under the launcher; prints ``ROW: ok`` for each row that
holds.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import meshwright as mw


def regression(outputs: int) -> tuple[Any, Any, Any]:
    """A function that builds a dense net, and 45 rows for it."""
    import keras
    import numpy as np

    def build() -> keras.Model:
        layers = [keras.layers.Dense(5), keras.layers.Dense(outputs)]
        model = keras.Sequential([keras.Input([6]), *layers])
        model.compile("sgd", "mse")
        return model

    draw = np.random.default_rng(3)
    x = draw.normal(size=[45, 6]).astype("float32")
    return build, x, draw.normal(size=[45, outputs]).astype("float32")


def train_law(row: Any) -> None:
    """Curve, weights, evaluation with a rest and prediction are one device's."""
    import numpy as np
    from oracle import Tolerance, agree

    sharded, measured, outputs = _asked(row.strategy(), row.subject)
    one, measured_one, outputs_one = _one_device(row.subject)
    agree(sharded, one, Tolerance(weights=1e-6, losses=1e-6))
    np.testing.assert_allclose(outputs, outputs_one, atol=2e-6)
    for name, value in measured_one.items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-6)


@functools.cache
def _one_device(subject: str) -> tuple[Any, dict[str, float], Any]:
    from oracle import OneDevice

    return _asked(OneDevice(), subject)


def _asked(strategy: Any, subject: str) -> tuple[Any, dict[str, float], Any]:
    """What a subject became in training under a strategy, how it was measured, and predicts."""
    from keras import optimizers
    from oracle import compiled, train
    from strategies import SUBJECTS

    of = SUBJECTS[subject]
    x, y = of.data(90)
    trained = train(strategy, compiled(of.build, lambda: optimizers.SGD(0.05, momentum=0.9)), x, y)
    options = {"batch_size": 16, "verbose": 0}
    measured = strategy.evaluate(trained.model, x[:37], y[:37], return_dict=True, **options)
    return trained, measured, strategy.predict(trained.model, x[:37], **options)


def save_law(row: Any) -> None:
    """Weights can be read, saved by one process, loaded and set on sharded models."""
    import jax
    import keras
    import numpy as np
    from keras import optimizers
    from oracle import OneDevice, compiled, made

    strategy = row.strategy()
    build = compiled(row.of.build, lambda: optimizers.SGD(0.05))
    model, one = made(strategy, build), made(OneDevice(), build)
    for ours, theirs in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1.2e-7)
    changed = [weight + 1 for weight in one.get_weights()]
    model.set_weights(changed)
    for ours, theirs in zip(model.get_weights(), changed, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
        for ours, theirs in zip(loaded.get_weights(), changed, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    strategy.place(loaded)
    assert len(loaded.weights[0].value.sharding.device_set) == jax.device_count()


def input_law(row: Any) -> None:
    """Each process reads the rows of its own devices only, or yields them, and no others."""
    import jax
    import numpy as np
    from oracle import OneDevice, made, weights

    class Counts(np.ndarray):
        """Notes how many rows are read of it."""

        rows_read = 0

        def __getitem__(self, index: Any) -> Any:
            result = np.asarray(self)[index]
            Counts.rows_read += len(result)
            return result

    build, x, y = regression(outputs=1)
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    options: dict[str, Any] = {"batch_size": 16, "epochs": 1, "verbose": 0}

    models = []
    for side, data in ((strategy, x.view(Counts)), (OneDevice(), x)):
        models.append(made(side, build))
        side.fit(models[-1], data, y, shuffle=True, **options)
    # Two batches of 16, of 8 rows here; 13 rows padded to 16, of which 8 here, or the 7 behind.
    assert Counts.rows_read <= 24, Counts.rows_read
    agree_on(*map(weights, models))

    def mine(half: int) -> Any:
        for start in (0, 16):
            rows = slice(start + 8 * half, start + 8 * half + 8)
            yield x[rows], y[rows]

    local, one = made(strategy, build), made(OneDevice(), build)
    data = mw.LocalRows(mine(jax.process_index()))
    strategy.fit(local, data, steps_per_epoch=2, shuffle=False, verbose=0)
    one.fit(x[:32], y[:32], shuffle=False, **options)
    agree_on(weights(local), weights(one))


def shard_law(row: Any) -> None:
    """Rows that are dealt out train as one device's, the rest that does not divide too; gradients
    go as one flat vector, and compressed they train as on two devices of one process."""
    import jax
    from oracle import OneDevice, made, weights

    build, x, y = regression(outputs=2)
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    sharded, one = made(strategy, build), made(OneDevice(), build)
    rows = mw.shard((x, y), batch_size=16)
    strategy.fit(sharded, rows, epochs=2, verbose=0)
    one.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    agree_on(weights(sharded), weights(one))

    program = strategy.program(sharded, (x[:16], y[:16]))
    trainer = mw.Trainer(program, strategy.placement)
    state, batch = trainer.init(), trainer.put((x[:16], y[:16]))
    text = trainer.step.lower(state, batch).compile().as_text()
    sums = [line for line in text.splitlines() if " all-reduce(" in line]
    assert sum(f"f32[{6 * 5 + 5 + 5 * 2 + 2}]" in line for line in sums) == 1, sums
    assert jax.process_count() == 2

    across = [next(d for d in jax.devices() if d.process_index == rank) for rank in range(2)]
    for how in (mw.PowerSGD(rank=1), mw.TopK(0.25)):
        both = [compressed(how, devices, x, y) for devices in (across, jax.local_devices()[:2])]
        agree_on(*both)


def batches_law(row: Any) -> None:
    """Of a PyDataset each process reads its share of the batches, and a step has the numbers of
    one device on the rows of both."""
    import jax
    import keras
    import numpy as np
    from oracle import OneDevice, made, weights

    build, x, y = regression(outputs=2)
    x, y = np.concatenate([x] * 3)[:128], np.concatenate([y] * 3)[:128]

    class Batches(keras.utils.PyDataset):
        read = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            self.read += 1
            return x[16 * index : 16 * index + 16], y[16 * index : 16 * index + 16]

    strategy, batches = mw.DataParallel(mw.create_mesh({"batch": 8})), Batches()
    sharded, one = made(strategy, build), made(OneDevice(), build)
    strategy.fit(sharded, mw.shard(batches), epochs=2, verbose=0)
    assert batches.read <= 3 + 2 * 4, batches.read  # sizes, and the first batch for the model
    assert jax.process_count() == 2
    order = np.arange(128).reshape(2, 8, 8).swapaxes(0, 1).ravel()  # a step reads in both halves
    one.fit(x[order], y[order], batch_size=16, epochs=2, shuffle=False, verbose=0)
    agree_on(weights(sharded), weights(one))


def own_batches_law(row: Any) -> None:
    """Batches that each process makes itself train as one device's up to the end of the first."""
    import warnings

    import jax
    from oracle import OneDevice, made, weights

    build, x, y = regression(outputs=2)
    read = []

    def make(index: int, count: int) -> Any:
        for start in range(8 * index, 32 if index else 45, 8 * count):
            read.append(start)
            yield x[start : start + 8], y[start : start + 8]

    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    sharded, one = made(strategy, build), made(OneDevice(), build)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if jax.process_index() else "ignore")
        strategy.fit(sharded, mw.shard(make, uneven="drop"), epochs=2, verbose=0)
    assert set(read) == ({8, 24} if jax.process_index() else {0, 16, 32})
    one.fit(x[:32], y[:32], batch_size=16, epochs=2, shuffle=False, verbose=0)
    agree_on(weights(sharded), weights(one))


def compressed(how: Any, devices: Any, x: Any, y: Any) -> dict[str, Any]:
    """The parameters after some steps whose gradients are compressed."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)

    first = {"w": np.ones([6, 2], "f"), "b": np.zeros([2], "f")}
    placement = mw.Placement.of(mw.create_mesh({"batch": 2}, devices=devices))
    options = mw.StepOptions(sums=mw.GradientSum(compress=how))
    trainer = mw.Trainer(mw.jax_program(loss, first, optax.sgd(0.1)), placement, options)
    state = trainer.init()
    for at in (0, 8, 16, 24):
        state, _ = trainer.step(state, trainer.put((x[at : at + 8], y[at : at + 8])))
    return {name: np.asarray(value) for name, value in state.params.items()}


def agree_on(actual: Any, expected: Any) -> None:
    import numpy as np

    for ours, theirs in zip(actual.values(), expected.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


LAWS = {
    "input": input_law,
    "shard": shard_law,
    "batches": batches_law,
    "own_batches": own_batches_law,
    "train": train_law,
    "save": save_law,
}


def main(law: str, *names: str) -> None:
    import jax
    from strategies import STRATEGIES

    assert jax.device_count() == 8
    assert len(jax.local_devices()) == 8 // jax.process_count()
    for row in STRATEGIES:
        if row.name in names:
            LAWS[law](row)
            print(f"{row.name}: ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
