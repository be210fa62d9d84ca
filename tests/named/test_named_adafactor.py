"""Adafactor over named arrays equals the paper's algorithm, and its slots lie as its parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
import meshwright.named as mn
from meshwright.named.adafactor import adafactor
from meshwright.named.operation import is_named

DIMS = {
    "matrix": "io:8 hidden:16",
    "tall": "hidden:16 vocab:32 kv:4",
    "small": "io:3 hidden:16",
    "bias": "hidden:16",
    "scale": "",
}
KINDS = {
    "none": None,
    "1-D": ("hidden:all", {"all": 8}),
    "2-D": ("io:rows;hidden:cols", {"rows": 4, "cols": 2}),
    "3-D": ("io:rows;hidden:cols;vocab:planes", {"rows": 2, "cols": 2, "planes": 2}),
}
FEW = ["matrix", "small"]  # one that is factored, one that is not
EVEN = [name for name in DIMS if name != "small"]  # what divides in every kind of rules


def full(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.full)


def scope(kind: str) -> Any:
    if KINDS[kind] is None:
        return mn.no_rules()
    rules, axes = KINDS[kind]
    return mn.rules(rules, mw.create_mesh(axes))


def numbers(seed: int, names: Any = tuple(DIMS), size: float = 1.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: np.asarray(
            size * random.normal(size=[d.size for d in mn.as_dims(DIMS[name])]), "float32"
        )
        for name in names
    }


def tree(arrays: dict[str, np.ndarray]) -> dict[str, mn.NamedArray]:
    return {name: mn.named(array, DIMS[name]) for name, array in arrays.items()}


class Paper:
    """Algorithms 4 to 6 of Shazeer and Stern (2018) for one array, in double precision.

    A stack of arrays is what a list of them is.
    """

    def __init__(self, x: np.ndarray, min_dim: int = 128, **options: Any) -> None:
        self.x = x.astype("float64")
        order = np.argsort(x.shape, kind="stable")
        self.pair = None
        if x.ndim >= 2 and x.shape[order[-2]] >= min_dim:
            self.pair = int(order[-2]), int(order[-1])
        self.t, self.options = 0, options
        self.r = self.c = self.v = self.m = 0.0

    def step(self, g: np.ndarray) -> np.ndarray:
        choose = self.options.get
        self.t += 1
        g = g.astype("float64")
        beta2 = 1 - self.t ** -choose("decay", 0.8)
        squares = g**2 + 1e-30
        if self.pair:
            second, first = self.pair
            self.r = beta2 * self.r + (1 - beta2) * squares.sum(first, keepdims=True)
            self.c = beta2 * self.c + (1 - beta2) * squares.sum(second, keepdims=True)
            self.v = self.r * self.c / self.r.sum(second, keepdims=True)
        else:
            self.v = beta2 * self.v + (1 - beta2) * squares
        u = g / np.sqrt(self.v)
        if choose("clip", 1.0) is not None:
            u = u / max(1.0, rms(u) / choose("clip", 1.0))
        rate = choose("learning_rate")
        alpha = min(1e-2, 1 / np.sqrt(self.t)) if rate is None else rate
        if choose("scale_by_parameter", True):
            alpha *= max(1e-3, rms(self.x))
        change = alpha * u
        if (beta1 := choose("momentum")) is not None:
            change = self.m = beta1 * self.m + (1 - beta1) * change
        if (lost := choose("weight_decay")) is not None:
            change = change + lost * self.x
        self.x = self.x - change
        return self.x


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def run(optimizer: Any, params: Any, grads: list[Any], jit: bool = True) -> tuple[Any, Any]:
    """Parameters and state after a step for each of the gradients."""

    def step(params: Any, state: Any, grad: Any) -> Any:
        changes, state = optimizer.update(grad, state, params)
        return jax.tree.map(lambda p, change: p + change, params, changes), state

    step = jax.jit(step) if jit else step
    state = optimizer.init(params)
    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


OPTIONS = {
    "as in the paper": {},
    "a rate": {"learning_rate": 0.3},
    "no clip": {"clip": None, "learning_rate": 0.1},
    "a tight clip": {"clip": 0.25},
    "absolute": {"scale_by_parameter": False, "learning_rate": 0.01},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.01, "decay": 0.5},
}


@pytest.mark.full_for("as in the paper")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option_is_the_papers(options: dict[str, Any]) -> None:
    params = numbers(0)
    grads = [numbers(seed, size=10.0**-seed) for seed in (1, 2, 3)]
    result, _ = run(adafactor(min_dim=8, **options), tree(params), [tree(g) for g in grads])
    for name, start in params.items():
        paper = Paper(start, min_dim=8, **options)
        for grad in grads:
            paper.step(grad[name])
        np.testing.assert_allclose(result[name].array, paper.x, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.full_for("3-D")
@pytest.mark.parametrize("kind", [full("1-D"), full("2-D"), "3-D"])
def test_rules_change_no_value(kind: str) -> None:
    params = numbers(0, EVEN)
    grads = [numbers(seed, EVEN) for seed in (1, 2)]
    with scope(kind):
        method = adafactor(min_dim=8, momentum=0.9)
        result, state = run(method, tree(params), [tree(g) for g in grads])
    for name, start in params.items():
        paper = Paper(start, min_dim=8, momentum=0.9)
        for grad in grads:
            paper.step(grad[name])
        np.testing.assert_allclose(result[name].array, paper.x, rtol=2e-5, atol=1e-6, err_msg=name)
    assert state.count == 2


@pytest.mark.full_for("2-D-False-names1", "3-D-True-names2")
@pytest.mark.parametrize(
    ("kind", "jit", "names"),
    [("2-D", True, EVEN), ("2-D", False, ["matrix"]), ("3-D", True, EVEN)],
)
def test_slots_are_split_with_their_parameter(kind: str, jit: bool, names: list[str]) -> None:
    with scope(kind):
        params, grads = tree(numbers(0, names)), tree(numbers(1, names))
        method = adafactor(min_dim=8, momentum=0.9)
        init = jax.jit(method.init)(params) if jit else method.init(params)
        step = jax.jit(method.update) if jit else method.update
        changes, state = step(grads, init, params)
        for slots in (init[1:], state[1:], changes):
            for slot in named_leaves(slots):
                lies, expected = slot.array.sharding, mn.layout_of(slot.dims).sharding
                assert lies.is_equivalent_to(expected, slot.array.ndim), (slot.dims, lies)


def named_leaves(tree: Any) -> list[mn.NamedArray]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_named) if is_named(x)]


def test_what_is_factored_over_what() -> None:
    state = adafactor(min_dim=8).init(tree(numbers(0)))
    assert state.rows["matrix"].shape == {"io": 8}
    assert state.columns["matrix"].shape == {"hidden": 16}
    assert state.rows["tall"].shape == {"hidden": 16, "kv": 4}
    assert state.columns["tall"].shape == {"vocab": 32, "kv": 4}
    assert state.whole["small"].shape == {"io": 3, "hidden": 16}
    assert state.whole["matrix"] is state.rows["small"] is state.momentum["bias"] is None


def test_no_parameters_are_no_slots() -> None:
    method = adafactor()
    changes, state = method.update({}, method.init({}), {})
    assert changes == {}
    assert int(state.count) == 1


def test_factored_only_from_128_on() -> None:
    params = {
        "below": mn.named(np.zeros([127, 256]), "io:127 hidden:256"),
        "at": mn.named(np.zeros([128, 256]), "io:128 hidden:256"),
    }
    state = adafactor().init(params)
    assert state.whole["below"] is not None
    assert state.whole["at"] is None


def test_a_stack_trains_as_its_parameters_do_one_by_one() -> None:
    random = np.random.default_rng(0)
    start, *grads = (random.normal(size=[3, 8, 16]).astype("float32") for _ in range(3))
    start *= np.array([1, 10, 100], "float32")[:, None, None]  # layers of unlike scale

    def name(x: np.ndarray) -> Any:
        return {"w": mn.named(x, "layers:3 io:8 hidden:16")}

    method = adafactor(min_dim=2, stacked="layers")
    result, state = run(method, name(start), [name(g) for g in grads])
    assert state.rows["w"].shape == {"layers": 3, "io": 8}
    for layer in range(3):
        paper = Paper(start[layer], min_dim=2)
        for grad in grads:
            paper.step(grad[layer])
        np.testing.assert_allclose(result["w"].array[layer], paper.x, rtol=2e-5, atol=1e-6)


def test_equals_optax_where_the_definitions_agree() -> None:
    params = numbers(0)
    grads = [numbers(seed) for seed in (1, 2, 3)]
    theirs = optax.adafactor(0.1, min_dim_size_to_factor=8, momentum=0.9, weight_decay_rate=0.01)
    ours = adafactor(0.1, min_dim=8, momentum=0.9, weight_decay=0.01)
    expected, _ = run(theirs, jax.tree.map(jnp.asarray, params), grads)
    result, _ = run(ours, tree(params), [tree(g) for g in grads])
    for name in DIMS:
        np.testing.assert_allclose(result[name].array, expected[name], rtol=1e-5, atol=1e-6)


def test_a_schedule_counts_from_zero_as_optax_has_it() -> None:
    params, grads = numbers(0, FEW), [numbers(1, FEW), numbers(2, FEW)]
    schedule = optax.linear_schedule(0.0, 1.0, 4)
    expected, _ = run(
        optax.adafactor(schedule, min_dim_size_to_factor=8),
        jax.tree.map(jnp.asarray, params),
        grads,
    )
    result, _ = run(adafactor(schedule, min_dim=8), tree(params), [tree(g) for g in grads])
    for name in FEW:
        np.testing.assert_allclose(result[name].array, expected[name], rtol=1e-5, atol=1e-6)


def test_optax_chains_it() -> None:
    params, grads = tree(numbers(0, FEW)), tree(numbers(1, FEW, size=100.0))
    both = optax.chain(optax.clip_by_global_norm(1e-3), adafactor(min_dim=8))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    clipped = jax.tree.map(lambda g: g * (1e-3 / norm), grads)
    result, _ = run(both, params, [grads])
    expected, _ = run(adafactor(min_dim=8), params, [clipped])
    for name in FEW:
        np.testing.assert_allclose(result[name].array, expected[name].array, rtol=1e-5, atol=1e-7)


def test_half_precision_parameters_have_slots_in_float32() -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(numbers(0, FEW)))
    method = adafactor(min_dim=8, momentum=0.9)
    changes, state = jax.jit(method.update)(params, method.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(changes)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state[1:])} == {jnp.dtype(jnp.float32)}


def test_a_gradient_of_zero_moves_nothing() -> None:
    params = tree(numbers(0, FEW))
    zero = jax.tree.map(jnp.zeros_like, params)
    result, _ = run(adafactor(min_dim=8), params, [zero, zero])
    for name in FEW:
        np.testing.assert_array_equal(result[name].array, params[name].array)


def test_a_parameter_of_zero_moves_away_from_it() -> None:
    params = jax.tree.map(jnp.zeros_like, tree(numbers(0, FEW)))
    result, _ = run(adafactor(min_dim=8), params, [tree(numbers(1, FEW))])
    for name in FEW:
        assert rms(np.asarray(result[name].array)) == pytest.approx(1e-5, rel=0.2)


class TestOptaxNeedsNothing:
    """Optax maps over the tree of named arrays as it does over any."""

    @pytest.mark.parametrize("jit", [True, full(False)])
    def test_adam_under_two_dimensional_rules_equals_one_device(self, jit: bool) -> None:
        params, grads = numbers(0, EVEN), [numbers(1, EVEN), numbers(2, EVEN)]
        expected, _ = run(optax.adam(0.1), jax.tree.map(jnp.asarray, params), grads)
        with scope("2-D"):
            result, state = run(optax.adam(0.1), tree(params), [tree(g) for g in grads], jit)
            for name in EVEN:
                np.testing.assert_allclose(result[name].array, expected[name], rtol=1e-5, atol=1e-6)
            for part in (result, state[0].mu, state[0].nu):
                for name in EVEN:
                    lies = part[name].array.sharding
                    here = mn.layout_of(DIMS[name]).sharding
                    assert lies.is_equivalent_to(here, part[name].array.ndim), (name, lies)
                    assert part[name].dims == mn.as_dims(DIMS[name])

    def test_sgd_with_momentum_as_well(self) -> None:
        params, grads = numbers(0, EVEN), [numbers(1, EVEN), numbers(2, EVEN)]
        method = optax.sgd(0.1, momentum=0.9)
        expected, _ = run(method, jax.tree.map(jnp.asarray, params), grads)
        with scope("2-D"):
            result, _ = run(method, tree(params), [tree(g) for g in grads])
        for name in EVEN:
            np.testing.assert_allclose(result[name].array, expected[name], rtol=1e-5, atol=1e-6)


class TestProgram:
    """``mw.jax_program`` takes named parameters, and this optimizer."""

    @pytest.mark.full_for("adafactor")
    @pytest.mark.parametrize("method", ["adafactor", "adam"])
    def test_a_program_learns_the_same_on_one_device_and_on_eight(self, method: str) -> None:
        def loss(params: Any, batch: Any) -> Any:
            x = mn.named(batch["x"], "batch:16 io:8")
            hidden = mn.relu(mn.einsum([x, params["w"]]))
            return mn.reduce_mean(mn.square(mn.einsum([hidden, params["v"]]) - x)).array

        random = np.random.default_rng(0)
        start = {
            "w": mn.named(random.normal(size=[8, 16]).astype("float32"), "io:8 hidden:16"),
            "v": mn.named(random.normal(size=[16, 8]).astype("float32"), "hidden:16 io:8"),
        }
        batch = {"x": random.normal(size=[16, 8]).astype("float32")}
        optimizer = adafactor(0.1, min_dim=8) if method == "adafactor" else optax.adam(0.01)
        program = mw.jax_program(loss, start, optimizer)
        layouts = {"w/array": [None, "model"], "v/array": ["model", None]}
        losses = []
        for axes in ({"batch": 1, "model": 1}, {"batch": 4, "model": 2}):
            mesh = mw.create_mesh(axes, jax.devices()[: axes["batch"] * axes["model"]])
            trainer = mw.Trainer(program, mw.Placement.of(mesh, layouts))
            steps = trainer.steps(trainer.init(), [batch] * 4)
            losses.append([float(step.logs["loss"]) for step in steps])
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
        assert losses[0][-1] < losses[0][0]

    def test_rules_of_a_placement_split_factored_slots(self) -> None:
        start = tree({name: numbers(0)[name] for name in ("matrix", "tall")})

        def loss(params: Any, batch: Any) -> Any:
            return mn.reduce_mean(mn.square(mn.einsum([batch, params["matrix"], params["tall"]])))

        program = mw.named_program(loss, start, adafactor(min_dim=8), batch="batch io")
        mesh = mw.create_mesh({"rows": 4, "cols": 2})
        placement = mw.Placement.of(mesh, rules="batch:rows;hidden:cols")
        trainer = mw.Trainer(program, placement)
        state = trainer.step(trainer.init(), np.ones([8, 8], "float32"))[0]
        lies = {path: str(layout.unbound()) for path, layout in trainer.layouts.slots.items()}
        assert lies == {
            "count": "[]",
            "rows/matrix": "[unsharded]",
            "columns/matrix": "[cols]",
            "rows/tall": "[cols, unsharded]",
            "columns/tall": "[unsharded, unsharded]",
        }
        assert state.slots["columns/matrix"].addressable_shards[0].data.shape == (8,)


class TestErrors:
    def test_choices_that_there_are_not(self) -> None:
        with pytest.raises(mw.ModelError) as info:
            adafactor(clip=0.0, decay=-1.0, momentum=1.0)
        for part in ("None; received 0.0", "received -1.0", "received 1.0"):
            assert part in str(info.value)

    def test_a_stacked_dim_that_no_parameter_has(self) -> None:
        with pytest.raises(
            mw.DimError, match=r"stacked='layer': no parameter has that dim.*hidden"
        ):
            adafactor(stacked="layer").init(tree(numbers(0)))

    def test_parameters_without_names(self) -> None:
        with pytest.raises(mw.DimError, match=r"no names for their dims: \['b'\]\['c'\], \['w'\]"):
            adafactor().init({"w": jnp.ones([2]), "b": {"c": jnp.ones([2])}})

    def test_parameters_not_given(self) -> None:
        params = tree(numbers(0))
        method = adafactor()
        with pytest.raises(mw.ModelError, match=r"update\(grads, state, params\)"):
            method.update(params, method.init(params))

    def test_schedules_without_steps(self) -> None:
        rates = mn.schedules
        for make, says in [
            (
                lambda: rates.truncated_rsqrt(0),
                "warmup_steps of at least 1; received warmup_steps=0",
            ),
            (
                lambda: rates.noam(-8, 0),
                "d_model and warmup_steps of at least 1; received d_model=-8",
            ),
            (lambda: rates.slanted_triangular(0, 1.0), "steps of at least 1"),
            (lambda: rates.slanted_triangular(9, 1.0, cut=2.0), "cut=2.0 is a part of all steps"),
        ]:
            with pytest.raises(mw.ModelError, match=says):
                make()

    def test_gradients_of_another_tree(self) -> None:
        params, method = {"w": mn.named(jnp.ones([2]), "a:2")}, adafactor()
        with pytest.raises(mw.ModelError, match=r"gradients are of \['v'\] and the parameters"):
            method.update({"v": params["w"]}, method.init(params), params)

    def test_a_state_of_other_options(self) -> None:
        params = {"w": mn.named(jnp.ones([2, 3]), "a:2 b:3")}
        state = adafactor().init(params)
        for method, says in [
            (adafactor(min_dim=2), r"has whole \[a:2 b:3\], and .* rows \[a:2\], columns \[b:3\]"),
            (adafactor(momentum=0.9), r"whole \[a:2 b:3\], momentum \[a:2 b:3\]. Give min_dim="),
        ]:
            with pytest.raises(mw.ModelError, match=says):
                method.update(params, state, params)

    def test_a_gradient_of_other_dims(self) -> None:
        params = {"w": mn.named(jnp.ones([2, 3]), "a:2 b:3")}
        grads = {"w": mn.named(jnp.ones([3, 2]), "b:3 a:2")}
        method = adafactor()
        with pytest.raises(mw.DimError, match=r"\[b:3 a:2\] and its parameter \[a:2 b:3\]"):
            method.update(grads, method.init(params), params)
