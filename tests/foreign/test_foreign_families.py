"""Models as others write them: laid out without a change, they train as on one device.

At small widths one step on eight CPU devices is that of one, in float64, where rounding decides
nothing; at real widths the model is built as shapes and dry-run on targets that are not there.

Each target is the same to every model, and each model to every target: one family has them all, the
others one in turn.
"""

from __future__ import annotations

import math
import re

import foreign_families as families
import keras
import numpy as np
import pytest
from foreign_families import DEEP, FAMILIES, MORE, RULES, Family

import meshwright as mw
from meshwright import _compat

pytestmark = pytest.mark.full

EVERY = FAMILIES | MORE
TARGETS = {"v5e:4x4": (4, 4), "v5p:4x4x4": (16, 4), "h100:8": (2, 4)}  # batch, model


def targets_of(name: str) -> list[str]:
    """Those that a family or a deep application is asked for."""
    if name == "Llama":
        return list(TARGETS)
    return [list(TARGETS)[[*EVERY, *DEEP].index(name) % len(TARGETS)]]


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def strategy_for(model: keras.Model, mesh: mw.Mesh, splits: tuple[str, ...]) -> mw.Sharded:
    paths = [variable.path for variable in model.variables]
    rules = {p: RULES[p] for p in splits if any(re.search(p, path) for path in paths)}
    return mw.Sharded(mesh, rules, unmatched="replicate")


@pytest.mark.parametrize("name", EVERY)
def test_a_step_is_that_of_one_device(name: str) -> None:
    family = EVERY[name]
    with _compat.double_precision():
        keras.utils.set_random_seed(1)
        alone, model = compiled(family.small()), compiled(family.small())
        model.set_weights(alone.get_weights())
        x, y = families.batch_of(model, families.ROWS)
        strategy = strategy_for(model, mw.create_mesh({"batch": 4, "model": 2}), family.splits)
        how = {"batch_size": families.ROWS, "shuffle": False, "verbose": 0}
        expected = alone.fit(x, y, **how).history["loss"]
        actual = strategy.fit(model, x, y, **how).history["loss"]
        assert actual == pytest.approx(expected, rel=1e-9)
        for variable, value in zip(alone.variables, model.variables, strict=True):
            np.testing.assert_allclose(
                np.asarray(value.value), np.asarray(variable.value), atol=1e-8, err_msg=value.path
            )
        split = [variable for variable in strategy.explain(model).placed if variable.layout.axes]
        assert split


def dry_runs(name: str, model: keras.Model, rows: int, splits: tuple[str, ...]) -> None:
    for target in targets_of(name):
        batch, parts = TARGETS[target]
        strategy = strategy_for(model, mw.Mesh({"batch": batch, "model": parts}), splits)
        report = mw.dry_run(
            model,
            families.shapes_of(model, rows),
            strategy=strategy,
            target=target,
            compile=False,
        )
        assert report.is_analytic
        memory = report.memory
        assert memory.argument_bytes < memory.peak_bytes
        assert memory.parameter_bytes >= 4 * model.count_params() / parts
        # Each kernel is multiplied with every row, and with every position where there are some;
        # thrice, but for the first layers, and each product takes two.
        *dims, _ = model.output.shape[1:]
        kernels = sum(math.prod(v.shape) for v in model.variables if v.path.endswith("kernel"))
        least = 6 * rows * math.prod(dims) * kernels
        assert report.flops * batch * parts >= 0.9 * least
        assert report.errors == ()
        assert report.collectives


@pytest.mark.parametrize("name", EVERY)
def test_real_widths_are_dry_run_on_targets_that_are_not_there(name: str) -> None:
    family: Family = EVERY[name]
    with mw.abstract():
        model = compiled(family.real())
    dry_runs(name, model, family.rows, family.splits)


@pytest.mark.parametrize("name", EVERY)
def test_the_planner_finds_a_layout_no_slower_than_those_with_a_name(name: str) -> None:
    family: Family = EVERY[name]
    with mw.abstract():
        model = compiled(family.real())
    batch = families.shapes_of(model, family.rows)
    for target in targets_of(name):
        families.check_plan(mw.plan(model, batch, target=target, limit_s=2))


def test_the_peak_of_one_family_is_near_the_compilers() -> None:
    model = compiled(FAMILIES["Llama"].small())
    strategy = strategy_for(model, mw.Mesh({"batch": 4, "model": 2}), FAMILIES["Llama"].splits)
    options = {"strategy": strategy, "target": "cpu:8", "blocks": "whole"}
    batch = families.shapes_of(model, 64)
    estimate = mw.dry_run(model, batch, compile=False, **options)
    compiled_step = mw.dry_run(model, batch, **options)
    assert estimate.flops == pytest.approx(compiled_step.flops, rel=0.01)
    assert 0.9 < estimate.peak_bytes / compiled_step.peak_bytes < 1.25


@pytest.mark.parametrize("name", DEEP)
def test_deep_applications_are_dry_run_and_planned(name: str) -> None:
    with mw.abstract():
        model = compiled(DEEP[name]())
    dry_runs(name, model, 64, ("(predictions|head)/kernel",))
    (target,) = targets_of(name)
    families.check_plan(mw.plan(model, families.shapes_of(model, 64), target=target, limit_s=2))
