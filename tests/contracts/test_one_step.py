"""The step that ``fit`` runs, that a Trainer takes and that a dry run compiles is the same text."""

from __future__ import annotations

import re
from typing import Any

import keras
import oracle
import pytest
from strategies import BATCH, QUICK, Row, rows

import meshwright as mw
from meshwright.frontends.keras.batches import abstract
from meshwright.frontends.keras.compiled import functions_of
from meshwright.frontends.keras.program import steps_of

OPTIONS = {"accumulate": 2, "remat": "block", "sums": "float32"}


def text(jitted: Any, *args: Any) -> str:
    """The step as it is lowered for CPUs, without the names of functions and places in files."""
    lowered = jitted.trace(*args).lower(lowering_platforms=("cpu",)).as_text()
    return re.sub(r"module @\w+", "module", lowered)


@pytest.mark.parametrize("row", rows())
def test_every_door_leads_to_one_step(row: Row) -> None:
    agree(row, row.strategy())


@pytest.mark.parametrize("row", rows(always=(), only=lambda row: row.name in QUICK))
def test_options_change_it_behind_every_door(row: Row) -> None:
    plain = row.strategy()
    agree(row, mw.Sharded.from_placement(plain.placement, mw.StepOptions(**OPTIONS)))


def agree(row: Row, strategy: mw.Sharded) -> None:
    x, y = row.of.data(BATCH)
    build = oracle.compiled(row.of.build, lambda: keras.optimizers.Adam(0.01))
    model = oracle.made(strategy, build)
    variables = strategy.prepare(model, lambda: (x, y))
    fitted = functions_of(strategy, model, variables)
    state = strategy.state(model)
    (batch,) = fitted.how.for_steps([strategy.put((x, y), model)] * fitted.how.accumulate)
    expected = text(fitted.train, state, batch)

    program = steps_of(strategy, model, variables).program
    trainer = mw.Trainer(program, strategy.placement, strategy.how)
    assert text(trainer.step, state, batch) == expected

    described = strategy.described(model, abstract((x, y)))
    assert text(described.jitted, described.state, described.batch) == expected
