"""What a dead server has lost, told exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.ps.coordinator.losses import Ledger


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_lost_is_what_came_after_the_snapshot(applied, snapshot, known):
    snapshot, known = min(applied, snapshot), min(applied, known)
    ledger = Ledger("ps:0")
    for version in range(1, applied + 1):
        assert ledger.acknowledged(100 + version, version, 0) is None
    ledger.snapshot(min(known, snapshot), 0)
    loss = ledger.restored(1, snapshot)
    assert list(loss.steps) == [100 + version for version in range(snapshot + 1, applied + 1)]


def test_an_acknowledgement_that_comes_late_is_lost_as_well():
    ledger = Ledger("ps:1")
    ledger.restored(1, version=5)
    assert ledger.acknowledged(40, version=5, generation=0) is None  # the snapshot has it
    late = ledger.acknowledged(41, version=6, generation=0)
    assert late is not None
    assert (late.server, late.steps) == ("ps:1", (41,))
    assert "1 steps" in str(late)


def test_what_was_said_after_the_restart_is_not_lost():
    ledger = Ledger("ps:0")
    ledger.acknowledged(1, version=8, generation=0)
    ledger.began(1, version=5)
    ledger.acknowledged(2, version=6, generation=1)  # before the coordinator knew of the restart
    assert ledger.restored(1, version=7).steps == (1,)  # 7: a snapshot later than the restart
    assert ledger.restored(2, version=0).steps == (2,)
