"""What comes after the blocks, computed by all stages, has the numbers of one device."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_transformer import KEEPS_GRADIENTS, TOKENS, WIDTH, batch_of, loss, params_of, tied_loss
from test_pipelines import SPLIT, assert_same, mesh_of, piped, stepped

import meshwright as mw
from meshwright.stages.table import Work, table_of

WORDS = 512  # whose head takes more FLOPs than four blocks


def program_of(of=loss):
    rng = np.random.default_rng(2)
    embed, head = (rng.normal(size=dims).astype("float32") / 4 for dims in ([WORDS, WIDTH],) * 2)
    params = {**params_of(8), "embed": embed, "head": head.T}
    return mw.jax_program(of, params, KEEPS_GRADIENTS, batch=batch_of())


@pytest.fixture(scope="module")
def one_device():
    return stepped(program_of(), {"data": 1})


def shares_loss(program, mesh, how, **more):
    placement = mw.Placement.of(mesh_of(mesh), batch="data" if "data" in mesh else None, **more)
    return mw.Trainer(program, placement, how).explain().ticks.shares_loss


@pytest.mark.parametrize(
    ("mesh", "how", "more"),
    [
        ({"stage": 4, "data": 2}, piped("1f1b", 8), {}),
        pytest.param(
            {"stage": 2, "model": 2}, piped("gpipe"), {"layouts": SPLIT}, marks=pytest.mark.full
        ),
        pytest.param({"stage": 4}, piped("gpipe", 8), {}, marks=pytest.mark.full),
        pytest.param(
            {"stage": 2, "data": 2},
            piped("circular", repeats=2),
            {"zero": 2},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"stage": 2, "data": 2, "model": 2},
            piped("1f1b", remat_stages=False),
            {"layouts": SPLIT, "zero": 1},
            marks=pytest.mark.full,
        ),
        pytest.param({"stage": 2, "data": 2}, piped(cuts=["blocks.3"]), {}, marks=pytest.mark.full),
    ],
)
def test_a_loss_of_all_stages_has_the_numbers_of_one_device(one_device, mesh, how, more):
    assert shares_loss(program_of(), mesh, how, **more)
    assert_same(stepped(program_of(), mesh, how, **more), one_device)


@pytest.mark.full
def test_tied_embeddings_get_the_gradients_of_both_ends():
    def tied(mesh, how=None):
        return stepped(program_of(tied_loss), mesh, how)

    assert_same(tied({"stage": 4, "data": 2}, piped("1f1b", 8)), tied({"data": 1}))


def test_what_would_not_shorten_a_step_stays_on_the_last_stage():
    small = mw.jax_program(loss, params_of(8), KEEPS_GRADIENTS, batch=batch_of())
    assert not shares_loss(small, {"stage": 2}, piped("1f1b", 4))
    assert not shares_loss(program_of(), {"stage": 4}, piped("zero_bubble", 8))
    assert not shares_loss(program_of(), {"stage": 3}, piped("1f1b", 8))


def test_logs_as_large_as_the_logits_keep_the_loss_on_the_last_stage():
    """They would all go to every stage."""

    def logged(params, batch):
        value, logs = loss(params, batch)
        return value, logs | {"wide": jnp.full([TOKENS, WORDS], logs["hits"])}

    assert not shares_loss(program_of(logged), {"stage": 4}, piped("1f1b", 8))


def test_a_shared_loss_takes_no_more_ticks_of_work_and_a_group_of_inputs_more():
    for schedule, repeats in [("gpipe", 1), ("1f1b", 1), ("circular", 2)]:
        alone, shared = (table_of(schedule, 4, 16, repeats, shares) for shares in (False, True))
        assert shared.faults() == []
        assert shared.time(1, 2, 0) == alone.time(1, 2, 0)
        more = 0 if schedule == "gpipe" else 4
        assert max(shared.in_flight) == max(alone.in_flight) + more
        losses = [sum(w.kind == "loss" for _, at, w in shared.works() if at == s) for s in range(4)]
        assert losses == [4] * 4


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_a_loss_too_early_too_late_or_elsewhere_is_a_fault(stages, groups, data):
    schedule, repeats = data.draw(st.sampled_from([("gpipe", 1), ("1f1b", 1), ("circular", 3)]))
    table = table_of(schedule, stages, stages * groups, repeats, shares_loss=True)
    assert table.faults() == []
    losses = [work for work in table.works() if work[2].kind == "loss"]
    tick, stage, work = data.draw(st.sampled_from(losses))
    rows = [[list(works) for works in row] for row in (*table.ticks, [()] * stages)]
    rows[tick][stage].remove(work)
    end = stages - 1  # of the forward pass, and of the backward pass
    early, late = (table.when[end, Work(k, *work.chunk)] for k in ("forward", "backward"))
    rows[data.draw(st.sampled_from([early, late + 1]))][stage].insert(0, work)
    assert replace(table, ticks=tuple(tuple(map(tuple, row)) for row in rows)).faults()


def test_a_table_of_micro_batches_that_do_not_divide_cannot_share_the_loss():
    with pytest.raises(mw.PipelineError, match="divide over the stages"):
        mw.Pipeline("stage", 6).table(4, shares_loss=True)
