"""Workers of several devices: the laws are those of one device, whatever the worker's mesh.

Without a cluster this process is the worker, with eight devices; the processes come last.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from deaths import Kill, workers_lost
from jax import export as jax_export
from training_models import apart, data, dense, ratings, recommender, same_history

import meshwright as mw
from meshwright.launch.local import LocalCluster
from meshwright.ps.coordinator.coordinator import ClusterCoordinator
from meshwright.ps.options import Tables
from meshwright.ps.shared.partitioners import FixedShardsPartitioner
from meshwright.ps.strategy import ParameterServer
from meshwright.ps.training import DiLoCo, LocalSGD
from meshwright.ps.training.exported import Exported, Filling

HOW = {"batch_size": 16, "shuffle": False, "epochs": 2, "verbose": 0}
SPLIT = {"hidden/kernel": [None, "model"], "hidden/bias": ["model"]}
LIMIT_S = 240.0


def rows(**options) -> mw.Sharded:
    return mw.Sharded(mw.create_mesh({"batch": 8}), **options)


def grid(layouts: dict = SPLIT, **options) -> mw.Sharded:
    return mw.Sharded(mw.create_mesh({"batch": 4, "model": 2}), layouts, **options)


def four() -> mw.Sharded:
    mesh = mw.create_mesh({"batch": 4}, devices=[f"cpu:{i}" for i in (5, 4, 7, 6)])
    return mw.Sharded(mesh)


WORKERS = {
    "rows": rows,
    "rows and columns": grid,
    "four of eight devices": four,
    "the optimizer's slots shared out": lambda: rows(zero=1),
    "gradients shared out": lambda: rows(zero=2),
    "parameters shared out": lambda: grid(zero=3),
    "recomputed": lambda: grid(remat="nothing_saveable", sums="float32"),
    "padded": lambda: grid({"output/bias": mw.Layout(["model"], pad=True), **SPLIT}),
    "activations": lambda: grid(activations={"hidden": ["batch", "model"]}),
}


def normalized(optimizer=None) -> keras.Model:
    """Batch statistics, dropout, and a layer that stands still."""
    keras.utils.set_random_seed(0)
    frozen = keras.layers.Dense(8, name="frozen", trainable=False)
    between = keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1), frozen
    return dense(optimizer or keras.optimizers.Adam(0.01), *between)


def exported_of(model: keras.Model) -> Exported:
    (_, served) = next(iter(model.__dict__["_meshwright_served"].values()))
    return served.exported


# Laws, with one device as the oracle


def test_a_step_over_rows_and_columns_is_that_of_one_device():
    """Of 26 rows the last 10 do not divide over 4: they are padded, for nothing mixes them."""
    x, y = data(26)
    expected, model = (dense(keras.optimizers.SGD(0.5, global_clipnorm=0.3)) for _ in range(2))
    history = expected.fit(x, y, **HOW).history
    with ParameterServer(worker=grid()) as strategy:
        same_history(history, strategy.fit(model, x, y, **HOW).history)
    assert apart(expected, model) < 1e-6
    first, last = (code.filling for _, code in exported_of(model).codes)
    assert (first, last) == (None, Filling(12, (True, False)))


@pytest.mark.full
@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_of_several_devices_trains_as_one_device(name):
    x, y = data(44)  # and 12 rows, which 8 devices do not share
    expected, model = normalized(), normalized()
    history = expected.fit(x, y, **HOW, validation_data=(x, y)).history
    with ParameterServer(
        worker=WORKERS[name](), partitioner=FixedShardsPartitioner(2), consistency="sync"
    ) as strategy:
        result = strategy.fit(model, x, y, **HOW, validation_data=(x, y)).history
        measured = strategy.evaluate(model, x, y, batch_size=16, return_dict=True)
    same_history(history, result)
    assert apart(expected, model) < 2e-6
    assert measured["loss"] == pytest.approx(history["val_loss"][-1], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("worker", [rows, grid])
def test_batches_of_any_size_are_computed_by_all_devices(worker):
    """Of a dataset's batches only the first is known: 16 rows divide, 13 do not, nor do 3."""
    x, y = data(40)
    cuts = [(0, 16), (16, 29), (29, 32), (32, 40)]

    def batches(_):
        for _ in range(2):
            yield from ((x[a:b], y[a:b]) for a, b in cuts)

    expected, model = normalized("sgd"), normalized("sgd")
    for a, b in cuts * 2:
        expected.train_on_batch(x[a:b], y[a:b])
    with ParameterServer(worker=worker()) as strategy:
        strategy.fit(model, batches, epochs=1, steps_per_epoch=8, verbose=0)
    assert apart(expected, model) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize(
    "worker",
    [
        rows,
        lambda: grid({"output/kernel": ["model", None]}, remat="block"),
        lambda: grid({}, inputs=["batch", "model", None, None]),
    ],
    ids=["batches", "features", "images"],
)
def test_images_split_over_rows_and_features_have_one_device_s_gradients(worker):
    rng = np.random.default_rng(2)
    x = rng.normal(size=[40, 8, 8, 3]).astype("float32")
    y = rng.integers(0, 3, [40])

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = keras.layers
        convolution = layers.Conv2D(4, 3, strides=2, padding="same", activation="gelu")
        flat = [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(3, name="output")]
        model = keras.Sequential([keras.Input([8, 8, 3]), convolution, *flat])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        return model

    expected, model = build(), build()
    history = expected.fit(x, y, **HOW).history
    with ParameterServer(worker=worker()) as strategy:
        same_history(history, strategy.fit(model, x, y, **HOW).history)
    assert apart(expected, model) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"zero": 3}, {"remat": "nothing_saveable"}], ids=str)
def test_rows_of_tables_are_taken_on_several_devices(options):
    x, y = ratings(44)
    expected, model = (recommender(keras.optimizers.SGD(0.5)) for _ in range(2))
    history = expected.fit(x, y, **HOW).history
    tables = ["user_table", "item_table"]
    with ParameterServer(worker=rows(**options)) as strategy:
        same_history(history, strategy.fit(model, x, y, tables=Tables(tables), **HOW).history)
    assert apart(expected, model) < 1e-6


@pytest.mark.full
def test_whole_tables_lie_by_their_rules():
    x, y = ratings(48)
    expected, model = (recommender(keras.optimizers.Adam(0.01)) for _ in range(2))
    history = expected.fit(x, y, **HOW).history
    worker = grid({"user_table/embeddings": ["model", None]})
    with ParameterServer(worker=worker) as strategy:
        same_history(history, strategy.fit(model, x, y, **HOW).history)
    assert apart(expected, model) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_local_steps_keep_their_slots_on_all_devices(zero):
    x, y = data(44)
    expected, model = normalized(), normalized()
    history = expected.fit(x, y, **HOW).history
    with ParameterServer(worker=grid(zero=zero), consistency="sync") as strategy:
        result = strategy.fit(model, x, y, **HOW, local=LocalSGD(2)).history
    same_history(history, result)
    assert apart(expected, model) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize("how", [{"compression": "float16"}, {"local": DiLoCo(every=3)}], ids=str)
def test_what_travels_otherwise_is_what_one_device_sends(how):
    x, y = data(64)
    models = [dense(keras.optimizers.SGD(0.5)) for _ in range(2)]
    for model, worker in zip(models, (None, grid()), strict=True):
        with ParameterServer(worker=worker) as strategy:
            strategy.fit(model, x, y, **HOW, **how)
    assert apart(*models) < 2e-4  # a rounding to 16 bits may fall to either side


@pytest.mark.full
def test_a_checkpoint_goes_on_anywhere(tmp_path: Path):
    """Several devices of a worker, one device of it, and the same mesh without servers."""
    x, y = data(64)
    how = {**HOW, "checkpoint": tmp_path}
    expected = dense(keras.optimizers.Adam(0.01))
    expected.fit(x, y, **{**HOW, "epochs": 5})
    model = dense(keras.optimizers.Adam(0.01))
    for epochs, worker in ((1, grid()), (2, None), (3, rows())):
        model = dense(keras.optimizers.Adam(0.01))
        with ParameterServer(worker=worker) as strategy:
            strategy.fit(model, x, y, **{**how, "epochs": epochs})
    with grid().scope():
        model = dense(keras.optimizers.Adam(0.01))
    grid().fit(model, x, y, **{**how, "epochs": 4})
    model = dense(keras.optimizers.Adam(0.01))
    with ParameterServer(worker=grid()) as strategy:
        strategy.fit(model, x, y, **{**how, "epochs": 5})
    assert apart(expected, model) < 1e-6
    assert int(model.optimizer.iterations) == 5 * 4


def blocks(optimizer: str = "sgd") -> keras.Model:
    """Equal blocks, which stages take."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input([6])
    x = keras.layers.Dense(8, name="first")(x)
    for number in range(4):
        x = x + keras.layers.Dense(8, activation="tanh", name=f"block_{number}")(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="output")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def by_stages(**options) -> mw.Sharded:
    mesh = mw.create_mesh({"stage": 4, "batch": 2})
    pipeline = mw.Pipeline("stage", 4, "1f1b")
    return mw.Sharded(mesh, batch="batch", unmatched="replicate", pipeline=pipeline, **options)


@pytest.mark.full
@pytest.mark.parametrize("how", [{}, {"local": LocalSGD(2)}], ids=["pushed", "local"])
def test_a_worker_s_stages_train_as_one_device(how: dict):
    """Of 44 rows the last 12 are no four micro-batches, and take no stages."""
    x, y = data(44)
    expected, model = blocks("adam"), blocks("adam")
    history = expected.fit(x, y, **HOW, validation_data=(x, y)).history
    with (
        ParameterServer(worker=by_stages(), consistency="sync") as strategy,
        pytest.warns(UserWarning, match="a batch of 12 rows does not divide into micro_batches=4"),
    ):
        found = strategy.fit(model, x, y, **HOW, **how, validation_data=(x, y)).history
    same_history(history, found)
    assert apart(expected, model) < 2e-6
    code = exported_of(model).codes[0][1]
    step = jax_export.deserialize(bytearray(code.local or code.gradients))
    assert "collective_permute" in step.mlir_module()


def test_a_worker_s_stages_take_no_tables_by_rows():
    x, y = ratings(16)
    with (
        ParameterServer(worker=by_stages()) as strategy,
        pytest.raises(mw.ModelError, match="a pipeline on workers does not support tables"),
    ):
        strategy.fit(recommender("sgd"), x, y, verbose=0, tables=Tables(["user_table"]))


# What is exported


def test_a_symbol_for_the_rows_divides_where_it_must():
    layout = mw.Layout(["batch"], mw.Mesh({"batch": 4}))
    layout.check(jax_export.symbolic_shape("4*n"))
    with pytest.raises(mw.DivisibilityError, match=r"dim 0 of array \(size n\)"):
        layout.check(jax_export.symbolic_shape("n"))


def test_the_step_is_one_program_over_the_devices_of_the_mesh():
    x, y = data(16)
    worker, model = grid(), dense("sgd")
    with ParameterServer(worker=worker) as strategy:
        strategy.evaluate(model, x, y, batch_size=16)
    exported_model = exported_of(model)
    step = jax_export.deserialize(bytearray(exported_model.codes[0][1].gradients))
    assert step.nr_devices == 8
    layouts, _ = jax.tree.unflatten(step.in_tree, step.in_shardings_jax(worker.mesh.jax_mesh))
    spec = jax.sharding.PartitionSpec
    assert layouts[0]["hidden/kernel"].spec == spec(None, "model")
    assert layouts[0]["output/kernel"].is_fully_replicated
    assert [leaf.spec[:1] for leaf in layouts[-1]] == [("batch",), ("batch",)]
    compiled = jax.jit(step.call, in_shardings=layouts).lower(*jax.tree.unflatten(
        step.in_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in step.in_avals]
    )[0]).compile()  # fmt: skip
    assert "all-reduce" in compiled.as_text()


# What is refused


def test_what_is_no_strategy_of_one_process_is_refused():
    with pytest.raises(mw.ClusterError, match=r"worker must be mw.Sharded.*received 4"):
        ParameterServer(worker=4)
    with pytest.raises(mw.ClusterError, match=r"accumulate=2.*gradient_accumulation_steps=2"):
        ParameterServer(worker=rows(accumulate=2))
    with pytest.raises(mw.ClusterError, match=r"this process is the worker.*create_mesh"):
        ParameterServer(worker=mw.Sharded(mw.Mesh({"batch": 8})))


@pytest.mark.parametrize(
    ("worker", "model", "error", "says"),
    [
        (
            lambda: grid({"hiden.*kernel": [None, "model"]}),
            lambda: dense("sgd"),
            mw.PlacementError,
            r"'hiden.\*kernel' matches no path. The nearest: 'hidden/kernel'",
        ),
        (
            lambda: grid({"output/kernel": [None, "model"]}),
            lambda: dense("sgd"),
            mw.PlacementError,
            r"output/kernel.*dim 1.*\(size 3\) does not divide over axis 'model' \(size 2\)",
        ),
        (
            lambda: grid({"user_table.*": ["model", None]}),
            lambda: recommender("sgd"),
            mw.ModelError,
            r"'user_table.\*' is for 'user_table/embeddings'\nRemove them, or.*embeddings",
        ),
    ],
    ids=["a mistyped rule", "a weight that does not divide", "a table that is not there"],
)  # fmt: skip
def test_what_cannot_lie_as_it_is_told_is_refused(worker, model, error, says):
    net = model()
    by_rows = net.name == "recommender"
    x, y = ratings(16) if by_rows else data(16)
    tables = Tables(["user_table"]) if by_rows else Tables()
    with ParameterServer(worker=worker()) as strategy, pytest.raises(error, match=says):
        strategy.fit(net, x, y, verbose=0, tables=tables)


def test_batches_that_never_divide_are_told_of_once():
    x, y = data(40)
    says = r"10 rows.*8 devices.*padded to 16.*Use batches of 8 or 16"
    with (
        ParameterServer(worker=rows()) as strategy,
        pytest.warns(mw.MeshwrightWarning, match=says) as warned,
    ):
        strategy.fit(dense("sgd"), x, y, batch_size=10, epochs=2, verbose=0)
    (warning,) = [one for one in warned if one.category is mw.MeshwrightWarning]
    assert warning.filename == __file__


# Processes, each with devices of its own


@contextlib.contextmanager
def trained_on(workers: int, **options) -> Iterator[tuple[LocalCluster, ParameterServer]]:
    """A cluster whose workers have four devices each, by twos, and a strategy on it."""
    worker = mw.Sharded(mw.Mesh({"batch": 2, "model": 2}), SPLIT)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        with (
            LocalCluster(workers, 2, heartbeat_s=0.2, logs=False, worker_devices=4) as cluster,
            ParameterServer(
                cluster, worker=worker, heartbeat_s=0.2, dead_after_s=5.0, **options
            ) as strategy,
        ):
            yield cluster, strategy
    finally:
        faulthandler.cancel_dump_traceback_later()


def total_on_all_devices(values: np.ndarray) -> tuple[int, float]:
    """What a scheduled function may do with the devices of its worker."""
    import jax
    import jax.numpy as jnp

    mesh = jax.make_mesh([jax.device_count()], ["all"])
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    return jax.device_count(), float(jax.jit(jnp.sum)(jax.device_put(values, spread)))


@pytest.mark.alone
def test_two_workers_of_four_devices_are_one_big_batch():
    x, y = data(64)
    expected, model = (dense(keras.optimizers.Adam(0.01)) for _ in range(2))
    history = expected.fit(x, y, **{**HOW, "batch_size": 32}).history
    with trained_on(2, consistency="sync") as (_, strategy):
        result = strategy.fit(model, x, y, **HOW).history
        coordinator = ClusterCoordinator(strategy)
        summed = coordinator.schedule(total_on_all_devices, args=(np.arange(8.0),))
        assert coordinator.fetch(summed) == (4, 28.0)
    assert apart(expected, model) < 1e-6
    assert result["loss"][-1] == pytest.approx(history["loss"][-1], rel=1e-5)


@pytest.mark.full
@pytest.mark.alone
def test_one_asynchronous_worker_of_four_devices_is_one_device():
    x, y = data(40)
    expected, model = normalized(), normalized()
    history = expected.fit(x, y, **HOW).history
    with trained_on(1) as (_, strategy):
        same_history(history, strategy.fit(model, x, y, **HOW).history)
    assert apart(expected, model) < 2e-6


@pytest.mark.full
@pytest.mark.alone
def test_workers_of_several_devices_that_die_lose_no_step():
    x, y = data(1600)
    model = dense(keras.optimizers.Adam(0.01))
    with trained_on(2) as (cluster, strategy):
        strategy.fit(model, x, y, batch_size=16, steps_per_epoch=20, verbose=0)
        kill = Kill(cluster, "worker:1", signal.SIGKILL, 1, 5)
        history = strategy.fit(model, x, y, callbacks=[kill], **{**HOW, "epochs": 8}).history
        assert workers_lost(strategy) > 0
    assert int(model.optimizer.iterations) == 20 + 8 * 100  # every step was applied once
    assert history["accuracy"][-1] > 0.9


def test_a_cluster_with_other_devices_than_the_mesh_is_refused(monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_WORKER_DEVICES", "2")  # as a launched chief finds it
    cluster = mw.ClusterSpec({"chief": ["ipc:///c"], "worker": ["ipc:///w"], "ps": ["ipc:///p"]})
    says = r"mesh of 4 devices \(batch=4\).*has 2.*worker_devices=4"
    with pytest.raises(mw.ClusterError, match=says):
        ParameterServer(cluster, worker=mw.Sharded(mw.Mesh({"batch": 4})))


@pytest.mark.full
@pytest.mark.alone
def test_a_worker_with_other_devices_than_the_mesh_says_both_numbers():
    x, y = data(16)
    worker = mw.Sharded(mw.Mesh({"batch": 4}))
    environment = {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    with (
        LocalCluster(1, 1, logs=False, env=environment) as cluster,
        ParameterServer(cluster, worker=worker) as strategy,
        pytest.raises(mw.TopologyError, match=r"mesh of 4 devices.*has 2 \(cpu\).*=4"),
    ):
        strategy.fit(dense("sgd"), x, y, verbose=0)
