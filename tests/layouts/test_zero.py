"""ZeRO: which dim is shared out, how much every device then holds, and what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.jaxprs.edits import equations
from meshwright.jaxprs.flops import model_flops
from meshwright.layouts.zero import SMALL_ELEMENTS, TILE, share_out
from meshwright.planning.abstract_step import of_program
from meshwright.step.accumulate import accumulating_in
from meshwright.step.platform import tracing_for

MESH = mw.Mesh({"batch": 4, "model": 2})
SPECS = st.lists(st.sampled_from([None, "model", "batch"]), min_size=1, max_size=3).filter(
    lambda specs: len([s for s in specs if s]) == len({s for s in specs if s})
)


@given(specs=SPECS, data=st.data())
def test_one_dim_more_is_split_over_the_batch_axis_or_nothing_is_changed(specs, data) -> None:
    layout = mw.Layout(specs, MESH)
    sizes = st.integers(1, 40)
    dims = [data.draw(sizes) * layout.num_shards(dim) for dim in range(layout.rank)]
    shared = share_out(layout, dims, ("batch",))
    local = layout.local_dims(dims)
    could = "batch" not in specs and any(size % 4 == 0 for size in local)
    large = np.prod(local) > SMALL_ELEMENTS
    assert (shared is not None) == (could and large)
    if shared is not None:
        smaller = shared.local_dims(dims)
        changed = [dim for dim in range(layout.rank) if smaller[dim] != local[dim]]
        assert len(changed) == 1
        assert smaller[changed[0]] * 4 == local[changed[0]]
        divisible = [dim for dim, size in enumerate(local) if size % 4 == 0]
        thick = [dim for dim in divisible if local[dim] // 4 >= tile_of(layout.rank)[dim]]
        if thick:
            assert changed == thick[:1]
        else:
            assert local[changed[0]] == max(local[dim] for dim in divisible)


def tile_of(rank: int) -> tuple[int, ...]:
    """What of each dim fills a tile of a TPU: the last two dims lie in it."""
    return (*[1] * rank, *TILE)[-rank:]


@pytest.mark.parametrize("zero", [True, 4, -1, "1", None])
def test_other_levels_are_refused(zero: object) -> None:
    with pytest.raises(mw.LayoutError, match=r"zero must be 0"):
        mw.Placement.of(MESH, zero=zero)  # type: ignore[arg-type]


def test_zero_without_batch_axes_is_refused() -> None:
    with pytest.raises(mw.LayoutError, match="zero=2 shards state over the axes of the batch"):
        mw.Placement.of(MESH, batch=None, zero=2)


def model() -> keras.Model:
    built = keras.Sequential(
        [
            keras.Input([256]),
            keras.layers.Dense(512, name="hidden"),
            keras.layers.Dense(64, name="middle"),
            keras.layers.Dense(8, name="output", use_bias=False),
        ]
    )
    built.compile(keras.optimizers.Adam(1e-3), "mse")
    return built


def held(part: dict[str, object]) -> int:
    """Bytes on the first device, from the live arrays."""
    return sum(array.addressable_data(0).nbytes for array in part.values())


@pytest.mark.full
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("axes", [{"batch": 8}, {"batch": 4, "model": 2}], ids=["8", "4x2"])
def test_live_bytes_follow_the_theory(axes: dict[str, int], level: int) -> None:
    rules = {"hidden/kernel": [None, "model"], "middle/kernel": ["model", None]}
    rules = rules if "model" in axes else {}
    batch = np.zeros([16, 256], "float32"), np.zeros([16, 8], "float32")
    bytes_at: dict[int, mw.TrainState] = {}
    for zero in (0, level):
        strategy = mw.Sharded(mw.create_mesh(axes), rules, zero=zero)
        with strategy.scope():
            built = model()
        strategy.fit(built, *batch, batch_size=16, verbose=0)
        bytes_at[zero] = strategy.state(built)
    limit = 1 / axes["batch"] + 0.02
    assert held(bytes_at[level].slots) <= limit * held(bytes_at[0].slots)
    of_parameters = held(bytes_at[level].params) / held(bytes_at[0].params)
    assert of_parameters <= limit if level == 3 else of_parameters == 1


def test_explain_lists_what_stays_replicated() -> None:
    strategy = mw.DataParallel(mw.create_mesh({"batch": 8}), zero=3)
    with strategy.scope():
        built = model()
    explained = strategy.explain(built)
    assert explained["hidden/kernel"].reason == "no layout: replicated, zero=3"
    assert str(explained["hidden/kernel"].layout.unbound()) == "[batch, unsharded]"
    assert explained["output/kernel"].layout.is_fully_replicated
    assert explained["output/kernel"].reason.endswith("zero=3: small, or no dim divides")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_recompute_computes_again_at_every_level(zero: int) -> None:
    def loss(params: dict[str, Any], x: Any) -> Any:
        for name in ("a", "b", "c"):
            x = mw.block_output(jnp.tanh(jnp.tanh(x @ params[name]) @ params[name]))
        return jnp.mean(x)

    params = {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in "abc"}
    program = mw.jax_program(loss, params, optax.sgd(0.1))
    rows = jax.ShapeDtypeStruct((8, 64), "float32")
    placement = mw.Placement.of(mw.Mesh({"batch": 4}), zero=zero)

    def products(remat: str) -> float:
        step = of_program(program, rows, placement, mw.StepOptions(remat=remat))
        result = model_flops(jax.make_jaxpr(step.train_step)(step.state, step.batch))
        assert result is not None
        return result / (2 * 8 * 64 * 64)

    assert products("none") == 6 + 11  # nothing needs the gradient of the rows
    # The last product of a block makes its output, which is kept, and the block itself is not.
    assert products("block") > products("none")
    assert products("nothing_saveable") > products("none")
    assert products("everything_saveable") == products("none")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_selective_recompute_keeps_products_with_weights_and_drops_the_scores(zero: int) -> None:
    def loss(params: dict[str, Any], x: Any) -> Any:
        for name in ("a", "b", "c"):
            h = x @ params[name]
            scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h, h))
            actual = jnp.einsum("bts,bsd->btd", scores, h)
            x = mw.block_output(x + jnp.tanh(actual @ params[name]))
        return jnp.mean(x)

    params = {name: jax.ShapeDtypeStruct((32, 32), "float32") for name in "abc"}
    program = mw.jax_program(loss, params, optax.sgd(0.1))
    rows = jax.ShapeDtypeStruct((8, 32, 32), "float32")
    placement = mw.Placement.of(mw.Mesh({"batch": 4}), zero=zero)

    def products(remat: str) -> float:
        step = of_program(program, rows, placement, mw.StepOptions(remat=remat))
        result = model_flops(jax.make_jaxpr(step.train_step)(step.state, step.batch))
        assert result is not None
        return result / (2 * 8 * 32 * 32 * 32)

    # In each block scores, and what is seen by them, are of no weights.
    assert products("selective") == products("none") + 3 * 2
    assert products("block") > products("selective")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_block_waits_for_its_gradients(zero: int) -> None:
    """XLA for GPUs, and for TPUs where products are kept, may else compute those of all blocks
    last, and hold what they read till then; and what waits for what changes no number."""
    params = {name: jax.random.normal(jax.random.key(i), (64, 64)) for i, name in enumerate("abc")}
    rows = jax.random.normal(jax.random.key(3), (8, 64))

    def loss(params: dict[str, Any], x: Any) -> Any:
        for name in params:
            x = mw.block_output(jnp.tanh(jnp.tanh(x @ params[name])))
        return jnp.mean(x**2)

    program = mw.jax_program(loss, params, optax.sgd(0.1))
    mesh = mw.create_mesh({"batch": 4}, devices=jax.devices()[:4])
    placement = mw.Placement.of(mesh, zero=zero)

    def barriers(platform: str, remat: str) -> int:
        step = of_program(program, jax.typeof(rows), placement, mw.StepOptions(remat=remat))
        with tracing_for(platform):
            return str(jax.make_jaxpr(step.train_step)(step.state, step.batch)).count("barrier")

    more = {  # the first block's input needs no gradient
        (platform, remat): barriers(platform, remat) - barriers("cpu", remat)
        for platform in ("cuda", "tpu")
        for remat in ("selective", "block", "none")
    }
    on_tpus = {("tpu", "selective")} if zero == 3 else set[tuple[str, str]]()
    waits = {("cuda", "selective"), ("cuda", "block")} | on_tpus
    assert more == {way: 2 if way in waits else 0 for way in more}

    def trained(platform: str, remat: str) -> dict[str, Any]:
        trainer = mw.Trainer(program, placement, mw.StepOptions(remat=remat))
        with tracing_for(platform):
            state, _ = trainer.train(trainer.init(), [rows, rows])
        return jax.tree.map(np.asarray, state.params)

    for platform, remat in waits:
        jax.tree.map(np.testing.assert_array_equal, trained(platform, remat), trained("cpu", remat))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_block_waits_for_each_devices_part_of_a_gradient(accumulate: int) -> None:
    """Sums over devices are after it. They travel in the type that they are computed in, but for
    what micro-batches add up."""

    def loss(params: dict[str, Any], x: Any) -> Any:
        for name in ("a", "b", "c"):
            x = mw.block_output(jnp.tanh(x @ params[name].astype("bfloat16")))
        return jnp.mean(x.astype("float32") ** 2)

    params = {name: jax.ShapeDtypeStruct((512, 512), "float32") for name in "abc"}
    program = mw.jax_program(loss, params, optax.sgd(0.1))
    rows = jax.ShapeDtypeStruct((64, 512), "bfloat16")
    how = mw.StepOptions(remat="block", accumulate=accumulate)
    step = of_program(program, rows, mw.Placement.of(mw.Mesh({"batch": 4})), how)
    with tracing_for("cuda"), accumulating_in("in a loop"):
        traced = list(equations(jax.make_jaxpr(step.train_step)(step.state, step.batch)))

    part, dtype = (4, 512, 512), "bfloat16" if accumulate == 1 else "float32"
    waited = [
        var.aval
        for eqn in traced
        if eqn.primitive.name == "optimization_barrier"
        for var in eqn.outvars
    ]
    assert [aval.dtype.name for aval in waited if aval.shape == part] == [dtype] * 2
    summed = [
        eqn.invars[0].aval
        for eqn in traced
        if eqn.primitive.name in ("reduce_sum", "reduce") and eqn.invars[0].aval.shape == part
    ]
    assert [aval.dtype.name for aval in summed] == [dtype] * 3
