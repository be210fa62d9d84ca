"""A table of laws: every optimizer that a server runs, beside the Keras optimizer itself."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest
from asking import Asking

import meshwright as mw
from meshwright.ps.server import stepping
from meshwright.ps.server.optimizers import REFUSED, TWINS

SHAPES = {"a": (7, 3), "b": (5,)}
STEPS = 5
RATE = 0.05

OWN: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.8}),
    ("RMSprop", {"centered": True, "rho": 0.7}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Adagrad", {}),
    ("Adagrad", {"initial_accumulator_value": 0.0, "epsilon": 1e-3}),
    ("Adadelta", {}),
    ("Adadelta", {"rho": 0.5, "epsilon": 1e-7, "learning_rate": 50.0}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "beta_2": 0.5}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adamax", {}),
    ("Nadam", {}),
    ("Ftrl", {}),
    (
        "Ftrl",
        {
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.03,
            "beta": 0.1,
            "learning_rate_power": -0.7,
        },
    ),
    ("Lion", {}),
    ("Lion", {"beta_1": 0.5}),
]
SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
COMMON: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"clipvalue": 0.3},
    {"use_ema": True, "ema_momentum": 0.8},
    {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
    {"loss_scale_factor": 8.0},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 2, "clipvalue": 0.3, "use_ema": True, "weight_decay": 0.1},
    {"learning_rate": SCHEDULE},
    {"learning_rate": SCHEDULE, "gradient_accumulation_steps": 2},
]


def names_of(case: Any) -> str:
    name, options = case
    return f"{name}-{'-'.join(key for key in options)}"


CASES = [pytest.param(case, id=names_of(case)) for case in OWN]
CASES += [
    pytest.param((name, options), id=names_of((name, options)), marks=marks)
    for name in TWINS
    for options in COMMON
    for marks in [() if name == "Adam" else pytest.mark.full]
]


def optimizer(name: str, options: dict[str, Any]) -> keras.Optimizer:
    own = {"epsilon": 1e-2} if name == "Adadelta" else {}  # whose first steps are very small else
    return getattr(keras.optimizers, name)(**{"learning_rate": RATE, **own, **options})


class Both:
    """The same variables under a Keras optimizer, and on a server."""

    def __init__(self, name: str, options: dict[str, Any], shapes=SHAPES) -> None:
        random = np.random.default_rng(1)
        self.keras = optimizer(name, options)
        values = {key: random.normal(size=shape).astype("f") for key, shape in shapes.items()}
        self.variables = {key: keras.Variable(value, name=key) for key, value in values.items()}
        self.keras.build(list(self.variables.values()))
        self.server = Asking()
        for key, value in values.items():
            self.server.value(key, value)
        config = keras.saving.serialize_keras_object(self.keras)
        self.server.ask("optimizer", group="g", config=config, names=list(values))
        self.random = random

    def gradients(self) -> dict[str, np.ndarray]:
        shapes = {key: variable.shape for key, variable in self.variables.items()}
        return {key: self.random.normal(size=s).astype("f") for key, s in shapes.items()}

    def step(self) -> None:
        gradients = self.gradients()
        self.apply(list(gradients.values()))
        self.server.push(*((key, "gradient", [value]) for key, value in gradients.items()))

    def apply(self, gradients: list[np.ndarray]) -> None:
        with jax.disable_jit():  # Keras' conditions would be compiled anew in every step
            self.keras.apply(gradients)

    def check(self) -> None:
        for key, variable in self.variables.items():
            close(self.server.read(key)[0], variable, key)
        for name, expected in self.keras_slots().items():
            close(self.server_slots()[name], expected, name)

    def keras_slots(self) -> dict[str, Any]:
        own = [f"{key}_" for key in self.variables]
        results = {v.name: v for v in self.keras.variables if v.name.startswith(tuple(own))}
        product = getattr(self.keras, "_u_product", None)
        return results | ({f"{own[0]}u_product": product} if product is not None else {})

    def server_slots(self) -> dict[str, np.ndarray]:
        answer = self.server.ask("slots", names=list(self.variables))
        names = [f"{key}_{slot}" for key, slots in answer.head["slots"] for slot in slots]
        return dict(zip(names, answer.arrays, strict=True))


def close(ours: np.ndarray, theirs: Any, what: str) -> None:
    expected = np.asarray(theirs.value)
    assert ours.dtype == expected.dtype
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-6, err_msg=what)


@pytest.mark.parametrize("case", CASES)
def test_a_server_steps_as_keras_does(case) -> None:
    both = Both(*case)
    before = both.server.read("a")[0]
    for _ in range(STEPS):
        both.step()
        both.check()
    assert np.abs(both.server.read("a")[0] - before).max() > 1e-3
    assert both.keras_slots().keys() <= both.server_slots().keys()


@pytest.mark.parametrize("case", CASES)
def test_rows_alone_change_and_as_keras_would_change_them(case) -> None:
    """The oracle is Keras' dense step, after which every other row is put back as it was."""
    both = Both(*case, shapes={"a": (7, 3)})
    variable = both.variables["a"]
    every = case[1].get("gradient_accumulation_steps", 1)
    pending: set[int] = set()
    for step in range(STEPS + 1):
        rows = both.random.integers(0, 6, size=4)
        values = both.random.normal(size=(4, 3)).astype("f")
        dense = np.zeros((7, 3), "f")
        np.add.at(dense, rows, values)
        kept = [variable, *(v for v in both.keras.variables if v.shape == (7, 3))]
        former = [np.asarray(v.value) for v in kept]
        both.apply([dense])
        pending |= set(rows.tolist())
        touched = pending if (step + 1) % every == 0 else set(rows.tolist())
        for v, before in zip(kept, former, strict=True):
            if "accumulator" in v.name and "gradient" in v.name:
                continue  # sums of all rows that came: nothing else touches them
            if v.name == "a_average" and not step:
                before = former[0]  # of all rows, an average begins as the value
            now = np.array(v.value)
            others = [row for row in range(7) if row not in touched]
            now[others] = before[others]
            v.assign(now)
        if (step + 1) % every == 0:
            pending.clear()
        both.server.push(("a", "rows_gradient", [rows, values]))
        both.check()


def test_an_average_begins_as_the_value_where_a_row_is_made_later() -> None:
    server = Asking()
    server.table("t", [0, 2], hash=True, kind="normal", seed=1)
    config = keras.saving.serialize_keras_object(keras.optimizers.SGD(0.1, use_ema=True))
    server.ask("optimizer", group="g", config=config, names=["t"])
    for key in (5, 9):
        before = server.ask("lookup", np.array([key]), name="t", make=True).arrays[0][0]
        server.push(("t", "rows_gradient", [np.array([key]), np.ones((1, 2), "f")]))
    with pytest.raises(mw.MeshwrightError, match="average of 't' takes 0 arrays, not 1"):
        server.push(("t", "average", [np.ones((2, 2), "f")]))
    average = server.ask("slots", names=["t"]).arrays[0]
    server.push(("t", "average", []))
    np.testing.assert_array_equal(server.read("t")[0], average)
    server.value("w", np.ones(2, "f"))
    with pytest.raises(mw.ModelError, match="'w' has no averages: its optimizer needs use_ema"):
        server.push(("w", "average", []))
    np.testing.assert_allclose(average[1], 0.99 * before + 0.01 * (before - 0.1), rtol=1e-5)


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("block", [1, 4, 1000])
def test_a_step_does_not_depend_on_its_blocks(name, block, monkeypatch) -> None:
    monkeypatch.setattr(stepping, "BLOCK_ELEMENTS", block)
    both = Both(name, {"use_ema": True, "clipvalue": 0.5})
    for _ in range(2):
        both.step()
    both.check()


@pytest.mark.parametrize("name", TWINS)
def test_a_shard_needs_nothing_of_the_others(name) -> None:
    whole, cut = Asking(), Asking()
    random = np.random.default_rng(3)
    value = random.normal(size=(9, 2)).astype("f")
    whole.value("w", value)
    whole.optimizer(name, ["w"], learning_rate=0.1)
    for part, rows in (("w#0", slice(0, 5)), ("w#1", slice(5, 9))):
        cut.value(part, value[rows])
    cut.optimizer(name, ["w#0", "w#1"], learning_rate=0.1)
    for _ in range(3):
        gradient = random.normal(size=(9, 2)).astype("f")
        whole.push(("w", "gradient", [gradient]))
        cut.push(("w#0", "gradient", [gradient[:5]]), ("w#1", "gradient", [gradient[5:]]))
    assert np.array_equal(whole.read("w")[0], np.concatenate(cut.read("w#0", "w#1")))


def test_excluded_variables_do_not_decay() -> None:
    both = Both("SGD", {"weight_decay": 0.5})
    excluded = keras.optimizers.SGD(RATE, weight_decay=0.5)
    excluded.exclude_from_weight_decay(var_names=["b"])
    excluded.build(list(both.variables.values()))
    both.keras = excluded
    config = keras.saving.serialize_keras_object(excluded)
    head = {"group": "g", "config": config, "names": ["a", "b"]}
    assert both.server.ask("optimizer", **head, exclude_from_weight_decay=["b"]).head["made"]
    both.step()
    both.check()


def test_a_rate_set_while_training_goes_before_the_optimizers_own() -> None:
    both = Both("Adam", {})
    both.step()
    both.keras.learning_rate = 0.5
    both.server.ask("rate", group="g", learning_rate=0.5)
    both.step()
    both.check()
    with pytest.raises(mw.TaskError, match=r"no group 'h' of variables here\. Groups: 'g'"):
        both.server.ask("rate", group="h", learning_rate=0.5)


def test_a_step_scales_its_rate() -> None:
    one, other = Both("SGD", {}), Both("SGD", {"learning_rate": RATE / 4})
    gradient = one.gradients()["a"]
    one.server.push(("a", "gradient", [gradient], {"scale": 0.25}))
    other.server.push(("a", "gradient", [gradient]))
    np.testing.assert_allclose(one.server.read("a")[0], other.server.read("a")[0], rtol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_need_more_than_a_shard_are_refused_by_name(name) -> None:
    server = Asking()
    server.table("w", [3, 3])
    with pytest.raises(mw.ModelError, match=rf"optimizer {name} does not run .* SGD, RMSprop"):
        server.optimizer(name, ["w"])
    with pytest.raises(mw.ModelError, match="has no optimizer here"):
        server.push(("w", "gradient", [np.zeros((3, 3), "f")]))


def test_every_optimizer_of_keras_is_in_the_table() -> None:
    known = {
        name
        for name in dir(keras.optimizers)
        if isinstance(getattr(keras.optimizers, name), type)
        and issubclass(getattr(keras.optimizers, name), keras.Optimizer)
    } - {"Optimizer"}
    assert known == TWINS.keys() | REFUSED.keys()


def test_custom_optimizers_and_settings_are_refused() -> None:
    server = Asking()
    server.table("w", [3])
    mine = {"class_name": "SGD", "config": {}, "module": "mine", "registered_name": "mine>SGD"}
    with pytest.raises(mw.ModelError, match="optimizer SGD of mine has no twin for servers"):
        server.ask("optimizer", group="g", config=mine, names=["w"])
    with pytest.raises(mw.ModelError, match="twin of SGD does not know shine=3"):
        server.optimizer("SGD", ["w"], shine=3)
    with pytest.raises(mw.ModelError, match="SGD takes numbers; received learning_rate='fast', mo"):
        server.optimizer("SGD", ["w"], learning_rate="fast", momentum=[0.9])
    with pytest.raises(mw.ModelError, match="'Mine' runs no code on a server"):
        server.optimizer("SGD", ["w"], learning_rate={"class_name": "Mine", "config": {}})
    with pytest.raises(mw.ModelError, match="clips the mean of 2 gradients by its norm"):
        server.optimizer("SGD", ["w"], clipnorm=1.0, gradient_accumulation_steps=2)


def test_the_answer_says_who_clips() -> None:
    server = Asking()
    server.table("w", [3])
    reply = server.optimizer("Adam", ["w"], learning_rate=0.1, global_clipnorm=2.0)
    assert (reply["phase"], reply["global_clipnorm"], reply["clipnorm"]) == ("two-phase", 2.0, None)
    assert server.optimizer("Adam", ["w"], learning_rate=0.1)["phase"] == "shard-local"


def test_the_same_optimizer_again_keeps_its_slots() -> None:
    server = Asking()
    server.table("w", [3])
    assert server.optimizer("Adam", ["w"])["made"]
    server.push(("w", "gradient", [np.ones(3, "f")]))
    assert not server.optimizer("Adam", ["w"])["made"]
    assert server.ask("slots", names=["w"]).arrays[0].all()
    assert server.optimizer("Adam", ["w"], beta_1=0.5)["made"]
    assert not server.ask("slots", names=["w"]).arrays[0].any()


def test_more_variables_may_come_to_an_optimizer_and_others_keep_what_they_have() -> None:
    server = Asking()
    for name in "abc":
        server.table(name, [3])
    adam: dict[str, Any] = {"class_name": "Adam", "config": {"learning_rate": 0.1}}
    server.ask("optimizer", group="one", config=adam, names=["a"])
    server.push(("a", "gradient", [np.ones(3, "f")]))
    server.ask("rate", group="one", learning_rate=0.5)
    assert server.ask("optimizer", group="one", config=adam, names=["a", "b"]).head["made"]
    assert server.ask("optimizer", group="two", config=adam, names=["b", "c"]).head["made"]
    assert not server.ask("optimizer", group="two", config=adam, names=["b", "c"]).head["made"]
    for name in "abc":
        server.push((name, "gradient", [np.ones(3, "f")]))
    head = server.ask("slots", names=["a", "b", "c"]).head
    assert head["steps"] == {"a": 2, "b": 1, "c": 1}
    moved = [[-0.6] * 3, [-0.5] * 3, [-0.1] * 3]
    np.testing.assert_allclose(server.read("a", "b", "c"), moved, rtol=1e-4)
    sgd = {"class_name": "SGD", "config": {}}
    server.ask("optimizer", group="one", config=sgd, names=["a"])
    assert server.ask("slots", names=["a", "b"]).head["slots"] == [["a", []], ["b", []]]


def test_integers_have_no_optimizer() -> None:
    server = Asking()
    server.table("steps", [], "int64")
    with pytest.raises(mw.ModelError, match=r"floats only; received 'steps' \(int64\)"):
        server.optimizer("SGD", ["steps"])


def test_a_variable_has_one_optimizer() -> None:
    server = Asking()
    server.table("w", [2])
    server.optimizer("SGD", ["w"])
    has_one = r"of other settings already: 'w' \(in 'g'\)\. They keep"
    with pytest.raises(mw.ModelError, match=has_one):
        server.ask("optimizer", group="h", config={"class_name": "Adam", "config": {}}, names=["w"])
