"""A program over named dims as a Program: one string lays it out, and the numbers stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
import meshwright.named as mn
from meshwright.hlo.collectives import read_collectives
from meshwright.planning import compile_ahead
from meshwright.step.accumulate import accumulating_in

BATCH, IO, HIDDEN = 16, 8, 64
RULES = {
    "data parallel": ({"all": 8}, "batch:all"),
    "model parallel": ({"all": 8}, "hidden:all"),
    "2-D": ({"rows": 4, "cols": 2}, "batch:rows;hidden:cols"),
    "3-D": ({"rows": 2, "cols": 2, "planes": 2}, "batch:rows hidden:cols io:planes"),
}


def init():
    keys = iter(jax.random.split(jax.random.key(0), 4))

    def normal(dims, scale=0.3):
        dims = mn.as_dims(dims)
        return mn.named(scale * jax.random.normal(next(keys), [d.size for d in dims]), dims)

    return {
        "up": {"kernel": normal(f"io:{IO} hidden:{HIDDEN}"), "bias": normal(f"hidden:{HIDDEN}")},
        "down": {"kernel": normal(f"hidden:{HIDDEN} io:{IO}")},
    }


def loss(params, batch):
    h = mn.relu(mn.einsum([batch["x"], params["up"]["kernel"]]) + params["up"]["bias"])
    y = mn.einsum([h, params["down"]["kernel"]])
    error = mn.reduce_mean(mn.square(y - batch["y"]))
    return error, {"largest": mn.reduce_max(y)}


def program(optimizer=None, **more):
    names = {"batch": {"x": "batch io", "y": "batch io"}}
    return mw.named_program(loss, init, optimizer or optax.adam(0.01), **{**names, **more})


def batches(count=3, rows=BATCH):
    draw = np.random.default_rng(0)
    return [
        {k: draw.normal(size=[rows, IO]).astype("float32") for k in ("x", "y")}
        for _ in range(count)
    ]


def placed(kind, **more):
    axes, rules = RULES[kind]
    return mw.Placement.of(mw.create_mesh(axes), rules=rules, **more)


def alone():
    return mw.Placement.of(mw.create_mesh({"all": 1}, devices=jax.devices()[:1]), batch=None)


def losses_on_one_device():
    """Plain JAX, bare arrays."""
    optimizer = optax.adam(0.01)
    params = jax.tree.map(np.asarray, init(), is_leaf=lambda n: isinstance(n, mn.NamedArray))

    def bare(params, batch):
        h = jax.nn.relu(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
        return jnp.mean((h @ params["down"]["kernel"] - batch["y"]) ** 2)

    @jax.jit
    def step(params, slots, batch):
        value, grads = jax.value_and_grad(bare)(params, batch)
        changes, slots = optimizer.update(grads, slots, params)
        return optax.apply_updates(params, changes), slots, value

    slots, result = optimizer.init(params), []
    for batch in batches():
        params, slots, value = step(params, slots, batch)
        result.append(float(value))
    return result, params


def train(trainer, many=None):
    state, result = trainer.init(), []
    for info in trainer.steps(state, many or batches()):
        state = info.state
        result.append(float(info.logs["loss"]))
    return result, state


@pytest.fixture(scope="module")
def expected():
    return losses_on_one_device()


def assert_same(state, params):
    for path, value in state.params.items():
        part, kind = path.split("/")
        np.testing.assert_allclose(np.asarray(value), params[part][kind], rtol=2e-4, atol=2e-5)


# What the program is


def test_paths_have_no_end_of_their_own_and_dims_have_names():
    infos = {info.path: info for info in program().infos}
    assert list(infos)[:3] == ["down/kernel", "up/bias", "up/kernel"]
    assert infos["up/kernel"].names == mw.dims("io hidden")
    assert infos["0/mu/up/kernel"].names == mw.dims("io hidden")
    assert infos["0/mu/up/kernel"].owner == "up/kernel"
    assert infos["0/count"].names is None


def test_bare_parameters_may_stand_beside_named_ones():
    mixed = mw.named_program(
        lambda p, b: p["scale"] * mn.reduce_mean(p["w"]),
        lambda: {"w": mn.named(jnp.ones([8]), "hidden:8"), "scale": jnp.ones([])},
        optax.sgd(0.1),
    )
    assert [(i.path, i.names) for i in mixed.params] == [
        ("scale", None),
        ("w", mw.dims("hidden")),
    ]
    trainer = mw.Trainer(mixed, mw.Placement.of(mw.create_mesh({"all": 8}), rules="hidden:all"))
    assert train(trainer, [{"x": np.zeros(8)}])[0] == [1.0]


def test_what_a_mask_leaves_out_has_no_slot():
    def matrices(params):  # as one writes it for weight decay: it looks at every array
        return jax.tree.map(lambda array: array.ndim > 1, params)

    masked = program(optax.masked(optax.adam(0.1), matrices))
    assert [info.path for info in masked.slots] == [
        "inner_state/0/count",
        *(f"inner_state/0/{kind}/{end}/kernel" for kind in ("mu", "nu") for end in ("down", "up")),
    ]
    assert masked.slots[1].names == mw.dims("hidden io")


# One string lays it all out


@pytest.mark.full
@pytest.mark.parametrize("kind", RULES)
def test_one_string_lays_out_parameters_slots_and_batch_and_the_losses_stay(kind, expected):
    placement = placed(kind)
    trainer = mw.Trainer(program(), placement)
    actual, state = train(trainer)
    np.testing.assert_allclose(actual, expected[0], rtol=1e-5)
    assert_same(state, expected[1])
    rules = mn.DimRules(RULES[kind][1])
    for part in (state.params, {p: v for p, v in state.slots.items() if p != "0/count"}):
        for path, value in part.items():
            names = ("hidden", "io") if "down" in path else ("io", "hidden")
            names = ("hidden",) if path.endswith("bias") else names
            specs = [rules.axis(name) for name in names]
            assert value.sharding.is_equivalent_to(
                mw.Layout(specs, placement.mesh).sharding, value.ndim
            )
    x = trainer.put(batches(1)[0])["x"]
    specs = [rules.axis("batch"), rules.axis("io")]
    assert mw.fetch_layout(x).specs == mw.Layout(specs).specs


def test_the_operations_inside_are_laid_out_too():
    observations = []

    def looking(params, batch):
        h = mn.einsum([batch["x"], params["up"]["kernel"]])
        jax.debug.inspect_array_sharding(h.array, callback=observations.append)
        return mn.reduce_mean(h)

    placement = placed("2-D")
    train(
        mw.Trainer(
            mw.named_program(looking, init, optax.sgd(0.1), batch={"x": "batch io"}), placement
        ),
        [{"x": np.ones([BATCH, IO])}],
    )
    expected = mw.Layout(["rows", "cols"], placement.mesh).sharding
    assert all(lies.is_equivalent_to(expected, 2) for lies in observations)
    assert observations


@pytest.mark.full
def test_without_names_a_batch_comes_as_it_is(expected):
    def naming(params, batch):
        return loss(params, {k: mn.named(v, f"batch:{BATCH} io:{IO}") for k, v in batch.items()})

    alone = mw.named_program(naming, init, optax.adam(0.01))
    actual, _ = train(mw.Trainer(alone, placed("2-D")))
    np.testing.assert_allclose(actual, expected[0], rtol=1e-5)


def test_a_path_rule_goes_before_the_names_and_axes_stay_axes():
    placement = placed("2-D")
    mixed = mw.Placement.of(
        placement.mesh, {"down/kernel": [None, "cols"]}, rules="batch:rows;hidden:cols"
    )
    table = mw.Trainer(program(), mixed).explain()
    assert table["down/kernel"].layout.specs == ("unsharded", "cols")
    assert table["up/kernel"].layout.specs == ("unsharded", "cols")
    assert table["up/kernel"].reason == "hidden:cols"


def test_without_rules_for_dims_a_named_program_is_as_any_other(expected):
    mesh = mw.create_mesh({"batch": 4, "cols": 2})
    placement = mw.Placement.of(mesh, {"up/kernel": [None, "cols"]})
    actual, _ = train(mw.Trainer(program(), placement))
    np.testing.assert_allclose(actual, expected[0], rtol=1e-5)


def test_the_table_shows_dims_and_rules():
    text = str(mw.Trainer(program(), placed("2-D")).explain())
    assert "io:8 hidden:64" in text
    assert "hidden:cols" in text


# What else a Program can do


@pytest.mark.full_for("2-D-1", "2-D-2", "2-D-3", "data parallel-3")
@pytest.mark.parametrize(
    ("kind", "zero"),
    [("data parallel", 1), ("2-D", 1), ("2-D", 2), ("data parallel", 3), ("2-D", 3)],
)
def test_zero_shares_out_on_top_of_the_rules(kind, zero, expected, monkeypatch):
    monkeypatch.setattr("meshwright.layouts.zero.SMALL_ELEMENTS", 8)
    trainer = mw.Trainer(program(), placed(kind, zero=zero))
    actual, state = train(trainer)
    np.testing.assert_allclose(actual, expected[0], rtol=1e-5)
    assert_same(state, expected[1])
    axis = "all" if kind == "data parallel" else "rows"
    assert axis in mw.fetch_layout(state.slots["0/mu/up/kernel"]).axes
    assert (axis in mw.fetch_layout(state.params["up/kernel"]).axes) == (zero == 3)


@pytest.mark.full_for("in a loop-0", "side by side-0", "written out-2")
@pytest.mark.parametrize(
    ("way", "zero"),
    [("side by side", 0), ("side by side", 2), ("in a loop", 0), ("written out", 2)],
)
def test_micro_batches_make_one_step(way, zero, expected, monkeypatch):
    monkeypatch.setattr("meshwright.layouts.zero.SMALL_ELEMENTS", 8)
    how = mw.StepOptions(accumulate=2)
    halves = [
        {k: v[i : i + BATCH // 2] for k, v in batch.items()}
        for batch in batches()
        for i in (0, BATCH // 2)
    ]
    with accumulating_in(way):
        _, state = train(mw.Trainer(program(), placed("2-D", zero=zero), how), halves)
    assert_same(state, expected[1])


def test_remat_changes_no_number(expected):
    how = mw.StepOptions(remat="nothing_saveable")
    actual, _ = train(mw.Trainer(program(), placed("2-D"), how))
    np.testing.assert_allclose(actual, expected[0], rtol=1e-5)


@pytest.mark.full
def test_a_checkpoint_goes_on_under_other_rules_and_on_another_mesh(tmp_path, expected):
    def run(kind, count, zero=0):
        trainer = mw.Trainer(program(), placed(kind, zero=zero))
        with mw.Checkpoints(tmp_path) as checkpoints:
            return trainer.train(trainer.init(), batches()[:count], checkpoints=checkpoints)

    run("2-D", 1)
    run("model parallel", 2)
    state, logs = run("3-D", 3, zero=1)
    assert float(logs["loss"]) == pytest.approx(expected[0][-1], rel=1e-5)
    assert_same(state, expected[1])
    saved = {f"{a.path} {a.dims}" for a in mw.read_checkpoint(tmp_path).arrays}
    assert "up/kernel (8, 64)" in saved


@pytest.mark.full
def test_factored_slots_lie_by_their_own_dims():
    optimizer = mn.adafactor(min_dim=8)
    trainer = mw.Trainer(program(optimizer), placed("2-D"))
    result, state = train(trainer)
    np.testing.assert_allclose(result, train(mw.Trainer(program(optimizer), alone()))[0], rtol=1e-5)
    assert mw.fetch_layout(state.slots["rows/up/kernel"]).specs == ("unsharded",)  # io
    assert mw.fetch_layout(state.slots["columns/up/kernel"]).specs == ("cols",)  # hidden


@pytest.mark.full
def test_a_dry_run_compiles_the_step_for_a_target():
    trainer = mw.Trainer(program(), placed("2-D"))
    compiled = compile_ahead(trainer.step, (trainer.init(), trainer.put(batches(1)[0])), "cpu:8")
    over = {axis for collective in compiled.of_kind("all-reduce") for axis in collective.axes}
    assert over == {"rows", "cols"}


@pytest.mark.full
def test_it_is_checked_like_any_other_program():
    mw.testing.assert_equivalent(
        lambda: (program(optax.sgd(0.1)), batches(1)[0]),
        [{"rows": 4, "cols": 2}, {"rows": 8}],
        rules="batch:rows;hidden:cols",
    )


# Errors


def test_a_rule_for_a_dim_that_nothing_has_is_an_error_when_it_is_traced():
    mesh = mw.create_mesh({"rows": 4, "cols": 2})
    placement = mw.Placement.of(mesh, rules="batch:rows;hiden:cols")
    trainer = mw.Trainer(program(), placement)
    with pytest.warns(mw.MeshwrightWarning, match="lies along axis 'cols'"):
        state = trainer.init()
    with pytest.raises(mw.LayoutError, match=r"no array had the dim of 'hiden:cols'.*hidden"):
        trainer.train(state, batches(1))


def test_with_strict_false_it_is_none():
    mesh = mw.create_mesh({"rows": 8})
    placement = mw.Placement.of(mesh, rules="batch:rows;hiden:rows", strict=False)
    trainer = mw.Trainer(program(), placement)
    jax.eval_shape(trainer.step, jax.eval_shape(program().initial), trainer.put(batches(1)[0]))


def test_a_dim_that_meets_another_on_its_axis_is_an_error_that_names_both():
    placement = mw.Placement.of(mw.create_mesh({"all": 8}), rules="batch:all;hidden:all")
    trainer = mw.Trainer(program(), placement)
    with pytest.raises(mw.LayoutError, match=r"'batch:16' and 'hidden:64' would both lie .*'all'"):
        train(trainer)


def test_parameters_that_do_not_divide_are_listed_at_once():
    mesh = mw.create_mesh({"rows": 2, "cols": 3}, devices=jax.devices()[:6])
    with pytest.raises(mw.PlacementError) as error:
        mw.Trainer(program(), mw.Placement.of(mesh, rules="hidden:cols;io:rows")).init()
    text = str(error.value)
    assert text.count("dim 'hidden' (size 64) does not divide over axis 'cols' (size 3)") == 3
    assert "up/kernel (8, 64): the variable [io:8 hidden:64]: dim 'hidden'" in text


def test_a_batch_unlike_its_names_is_an_error():
    trainer = mw.Trainer(program(batch={"x": "batch io"}), placed("2-D"))
    with pytest.raises(mw.DimError, match=r"a batch has arrays 'x', 'y', and batch= .* names 'x'"):
        train(trainer)
    trainer = mw.Trainer(program(batch={"x": "batch", "y": "batch io"}), placed("2-D"))
    with pytest.raises(mw.BatchError, match=r"input 'x' has 2 dims \(16, 8\)"):
        train(trainer)


def test_a_batch_that_does_not_divide_is_an_error_with_the_sizes_that_do():
    with pytest.raises(mw.BatchError, match=r"a batch of 18 .* axis 'rows'.*: 16 and 20"):
        train(mw.Trainer(program(), placed("2-D")), batches(1, rows=18))


def test_a_loss_with_dims_is_an_error():
    several = mw.named_program(lambda p, b: b["x"], init, optax.sgd(0.1), batch={"x": "batch io"})
    with pytest.raises(mw.ModelError, match=r"the loss has dims \[batch:16 io:8\].*reduce_mean"):
        train(mw.Trainer(several, placed("2-D")), [{"x": np.ones([BATCH, IO])}])


@pytest.mark.parametrize(
    ("logs", "says"),
    [((3,), "the logs that a loss returns must be a dict"), ((3, 4), "received tu")],
)
def test_a_loss_with_other_logs_is_an_error(logs, says):
    wrong = mw.named_program(
        lambda p, b: (mn.reduce_sum(p["w"]), *logs),
        {"w": mn.named(np.ones(4, "float32"), "io:4")},
        optax.sgd(0.1),
    )
    with pytest.raises(mw.ModelError, match=says):
        train(mw.Trainer(wrong, alone()), [{"x": np.ones([BATCH, IO])}])


def test_prediction_needs_a_forward_function():
    with pytest.raises(mw.ModelError, match="no forward function: pass forward="):
        program().forward({}, {}, None, False)


def test_the_forward_pass_is_laid_out_too_and_the_backward_pass_is_traced_under_the_rules():
    traced = []

    def noting(inputs, result, gradient):
        traced.append(mn.in_force())
        return gradient

    noted = mn.custom_gradient(mn.tanh, noting)
    both = mw.named_program(
        lambda p, b: mn.reduce_mean(noted(mn.einsum([b["x"], p["up"]["kernel"]]))),
        init,
        optax.sgd(0.1),
        batch={"x": "batch io"},
        forward=lambda p, x: mn.einsum([x, p["up"]["kernel"]]),
    )
    placement = placed("2-D", zero=3)
    trainer = mw.Trainer(both, placement)
    state = trainer.init()
    x = mn.named(batches(1)[0]["x"], f"batch:{BATCH} io:{IO}")
    y = trainer.forward(state, x)
    assert mw.fetch_layout(y.array).specs == ("rows", "cols")
    np.testing.assert_allclose(y.array, x.array @ state.params["up/kernel"], rtol=1e-5)
    jax.eval_shape(trainer.step, state, trainer.put({"x": x.array}))
    assert str(traced[0].rules) == "batch:rows;hidden:cols"


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_transformer_trains_alike_whatever_else_a_step_does(zero, accumulate, monkeypatch):
    monkeypatch.setattr("meshwright.layouts.zero.SMALL_ELEMENTS", 8)
    model = mn.models.Transformer("length:8 vocab:16 d_model:8 d_ff:16 heads:2 d_kv:4 layers:1")
    language = mw.named_program(
        lambda params, batch: model.loss(params, batch["tokens"]),
        lambda: model.init(jax.random.key(0)),
        mn.adafactor(0.05),
        batch={"tokens": "batch length"},
    )
    tokens = np.random.default_rng(0).integers(0, 16, [3, 16, 8])

    def trained(placement, how):
        rows = 16 // how.accumulate
        parts = [{"tokens": t[i : i + rows]} for t in tokens for i in range(0, 16, rows)]
        return train(mw.Trainer(language, placement, how), parts)[1].params

    expected = trained(alone(), mw.StepOptions())
    mesh = mw.create_mesh({"rows": 4, "cols": 2})
    rules = "batch:rows;vocab:cols;d_ff:cols;heads:cols"
    how = mw.StepOptions(accumulate=accumulate)
    result = trained(mw.Placement.of(mesh, rules=rules, zero=zero), how)
    for path, value in result.items():
        np.testing.assert_allclose(value, expected[path], rtol=2e-3, atol=2e-4, err_msg=path)


@pytest.mark.full
def test_a_dry_run_lays_the_operations_out_as_training_does():
    def gathering(params, batch):
        # Only the rule for what comes out makes this a sum over pieces; XLA alone would gather.
        hidden = mn.einsum([batch["x"], params["up"]["kernel"]])
        moved = mn.rename(hidden, {"batch": "hidden_too", "hidden": "batch_too"})
        return mn.reduce_mean(mn.square(mn.shift(moved, 3, "hidden_too")))

    rules = "batch:rows;hidden:cols;hidden_too:cols;batch_too:rows"
    moving = mw.named_program(gathering, init, optax.sgd(0.1), batch={"x": "batch io"})
    mesh = mw.create_mesh({"rows": 4, "cols": 2})
    placement = mw.Placement.of(mesh, rules=rules)
    trainer = mw.Trainer(moving, placement)
    x = {"x": batches(1)[0]["x"]}
    compiled = trainer.step.lower(trainer.init(), trainer.put(x)).compile()
    real = read_collectives(compiled.as_text(), mesh.axes)
    report = mw.dry_run(moving, x, strategy=placement, target="cpu:8")

    def counted(collectives):
        return sorted((c.kind, c.axes, c.elements) for c in collectives)

    assert counted(report.compiled.collectives) == counted(real)
    assert any(c.kind == "all-to-all" or c.kind == "collective-permute" for c in real)
