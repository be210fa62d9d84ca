"""Gradients summed as flat vectors are those that XLA sums, and other sums are what they say."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.step.summing import sum_flat

DRAW = np.random.default_rng(5)
SHAPES = {"first": (12, 24), "bias": (24,), "second": (24, 8), "scale": (8,)}
PARAMS = {name: DRAW.normal(size=dims).astype("float32") for name, dims in SHAPES.items()}
BATCHES = [
    (DRAW.normal(size=(32, 12)).astype("float32"), DRAW.normal(size=(32, 8)).astype("float32"))
    for _ in range(4)
]


def loss(params: Any, batch: Any) -> Any:
    x, y = batch
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["second"] * params["scale"] - y) ** 2)


def trainer(axes: Any = None, batch: Any = "batch", **how: Any) -> mw.Trainer:
    program = mw.jax_program(loss, PARAMS, optax.adam(0.01))
    mesh = mw.create_mesh(axes or {"batch": 8})
    return mw.Trainer(program, mw.Placement.of(mesh, batch=batch), mw.StepOptions(**how))


def trained(**options: Any) -> dict[str, np.ndarray]:
    made = trainer(**options)
    state, _ = made.train(made.init(), BATCHES)
    return {name: np.asarray(value) for name, value in state.params.items()}


@pytest.fixture(scope="module")
def by_xla() -> dict[str, np.ndarray]:
    return trained()


HOSTS = {"host": 2, "local": 4}


@pytest.mark.parametrize(
    ("options", "within"),
    [
        ({"sums": mw.GradientSum()}, 1e-6),
        ({"sums": mw.GradientSum(fusion_bytes=500)}, 1e-6),
        ({"sums": mw.GradientSum(fusion_bytes=0)}, 1e-6),
        (
            {"axes": HOSTS, "batch": ("host", "local"), "sums": mw.GradientSum(inner="local")},
            1e-6,
        ),
        ({"sums": mw.GradientSum(wire="bfloat16")}, 4e-3),  # of steps of Adam of 0.01
        ({"sums": mw.GradientSum(wire="float16")}, 1e-3),
        (
            {
                "axes": HOSTS,
                "batch": ("host", "local"),
                "sums": mw.GradientSum(inner="local", wire="float16"),
            },
            1e-3,
        ),
    ],
    ids=lambda value: str(value.get("sums")) if isinstance(value, dict) else None,
)
def test_flat_sums_train_as_those_of_xla(options: Any, within: float, by_xla: Any) -> None:
    for name, value in trained(**options).items():
        np.testing.assert_allclose(value, by_xla[name], atol=within)


def test_micro_batches_are_summed_once_as_one_vector(by_xla: Any) -> None:
    plain, flat = trained(accumulate=2), trained(accumulate=2, sums=mw.GradientSum())
    for name in plain:
        np.testing.assert_allclose(flat[name], plain[name], atol=1e-6)
    made = trainer(accumulate=2, sums=mw.GradientSum())
    sums = all_reduces(made, tuple(map(made.put, BATCHES[:2])))
    assert sums.count(ELEMENTS) == 1


ELEMENTS = sum(value.size for value in PARAMS.values())


def all_reduces(made: mw.Trainer, batch: Any) -> list[int]:
    """The elements of each array that the compiled step sums over devices."""
    text = made.step.lower(made.init(), batch).compile().as_text()
    found = re.findall(r"= (\([^=]*?\)|\S+) all-reduce\(", text)
    arrays = [dims for result in found for dims in re.findall(r"\w+\[([\d,]*)\]", result)]
    return [int(np.prod([int(size) for size in dims.split(",") if size])) for dims in arrays]


def test_all_gradients_go_as_one_vector() -> None:
    made = trainer(sums=mw.GradientSum())
    assert [size for size in all_reduces(made, made.put(BATCHES[0])) if size > 1] == [ELEMENTS]
    apart = trainer()
    assert ELEMENTS not in all_reduces(apart, apart.put(BATCHES[0]))


def test_half_as_many_bytes_travel() -> None:
    made = trainer(sums=mw.GradientSum(wire="bfloat16"))
    text = made.step.lower(made.init(), made.put(BATCHES[0])).compile().as_text()
    assert max(all_reduces(made, made.put(BATCHES[0]))) == 1  # the loss
    for kind in ("all-to-all", "all-gather"):
        assert re.search(rf"u16\[[^=]* {kind}\(", text)


# Adasum, beside its definition (Maleki et al., 2021, equation 2)


def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot = float((a * b).sum())
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b


def adasum(pieces: Any) -> dict[str, np.ndarray]:
    mesh = mw.create_mesh({"batch": 8}).jax_mesh
    how = mw.GradientSum(op="adasum")
    sums = jax.jit(lambda parts: sum_flat(parts, mesh, ("batch",), how))(pieces)
    return {name: np.asarray(value) for name, value in sums.items()}


def test_adasum_is_combined_in_pairs_array_by_array() -> None:
    parts = {name: DRAW.normal(size=(8, *dims)).astype("float32") for name, dims in SHAPES.items()}
    for name, value in adasum(parts).items():
        left = list(parts[name].astype("float64") * 8)  # parts are shares of the mean
        while len(left) > 1:
            left = [combined(a, b) for a, b in zip(left[::2], left[1::2], strict=True)]
        np.testing.assert_allclose(value, left[0], rtol=1e-4, atol=1e-4)


def test_adasum_averages_what_is_parallel_and_adds_what_is_orthogonal() -> None:
    alike = np.tile(np.arange(1, 9, dtype="float32"), (8, 1)) / 8
    np.testing.assert_allclose(adasum({"w": alike})["w"], np.arange(1, 9), rtol=1e-5)
    np.testing.assert_allclose(adasum({"w": np.eye(8, dtype="float32") / 8})["w"], np.ones(8))


# What cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 1}, "sums=GradientSum: zero=1 keeps and updates state in pieces"),
        ({"axes": {"batch": 4, "model": 2}}, "splits more than the batch: model"),
        ({"sums": mw.GradientSum(inner="host")}, "inner=.'host',. names host"),
        (
            {"axes": {"batch": 6}, "sums": mw.GradientSum(op="adasum")},
            "6 pieces of the batch are not a power of two",
        ),
    ],
)
def test_where_gradients_cannot_be_summed_so_the_error_says_why(options: Any, message: str) -> None:
    options = {"sums": mw.GradientSum(), "axes": {"batch": 8}, **options}
    mesh = mw.Mesh(options.pop("axes"))
    with pytest.raises(mw.LayoutError, match=message):
        mw.Sharded(mesh, **options)


def test_invalid_choices_are_listed_together() -> None:
    with pytest.raises(mw.ModelError) as caught:
        mw.GradientSum(fusion_bytes=-1, wire="int8", op="max")  # pyright: ignore[reportArgumentType]
    for text in ("fusion_bytes must be", "wire must be None or one of", "op must be one of"):
        assert text in str(caught.value)
    with pytest.raises(mw.ModelError, match="is not supported together with inner="):
        mw.GradientSum(op="adasum", inner="local")
