"""A push: applied as a whole, once, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import ProtocolError
from ..wire.message import Message
from .rounds import Gradient
from .state import State
from .updates import Checked, check_updates


def push(state: State, peer: str, message: Message) -> dict[str, Any]:
    """Apply a push, and report the outcome, as the head of the answer.

    ``applied`` is False for a step that was applied before (``duplicate``), and where all that it
    brings comes too late for its round (``dropped``). ``version`` is the one at which the step
    was applied.
    """
    head = message.head
    step = head.get("step")
    state.applied.forget_below(int(head.get("done_below") or 0))
    if step is not None and step in state.applied:
        state.counts.duplicates += 1
        version = state.applied.version_of(step)
        answer = {"applied": False, "duplicate": True, "staleness": 0, **_rounds(state, head)}
        return _answer(state, answer, state.version if version is None else version)
    version_read = head.get("seen")
    staleness = max(0, state.version - version_read) if version_read is not None else 0
    checked = check_updates(state.store, state.groups, head["updates"], message.arrays, staleness)
    _check_then_read(state, head)
    if head.get("round") is not None:
        return _push_round(state, head, step, checked)
    for change in checked.changes:
        change.apply()
    for gradient in checked.gradients:
        state.apply_gradient(gradient, peer)
    _count(state, step, staleness, bool(checked.changes or checked.gradients))
    return _answer(state, {"applied": True, "staleness": staleness}, state.version)


def _push_round(
    state: State, head: Mapping[str, Any], step: int | None, checked: Checked
) -> dict[str, Any]:
    """Changes are made at once; gradients wait for those of the other steps of their round."""
    if step is None:
        raise ProtocolError(
            f"a push to round {head['round']} has no step id, by which a round is summed up.",
            state.task,
        )
    number = int(head["round"])
    gradients = [_owned(gradient) for gradient in checked.gradients]
    is_in_time = state.rounds.offer(number, int(head["of"]), step, gradients)
    for change in checked.changes:
        change.apply()
    state.counts.dropped += not is_in_time
    applied = is_in_time or bool(checked.changes)
    _count(state, step, 0, applied)
    version = state.version
    state.apply_rounds()
    answer = {"applied": applied, "staleness": 0, "dropped": not is_in_time, **_rounds(state, head)}
    return _answer(state, answer, version)


def _count(state: State, step: int | None, staleness: int, applied: bool) -> None:
    if applied:
        state.version += 1
        state.counts.pushes += 1
        state.counts.stale(staleness)
    if step is not None:
        state.applied.add(step, state.version)


def _rounds(state: State, head: Mapping[str, Any]) -> dict[str, Any]:
    return {} if head.get("round") is None else {"clipping": state.clipping_head()}


def _answer(state: State, answer: dict[str, Any], version: int) -> dict[str, Any]:
    return {**answer, "applied_at": version, "snapshot": state.snapshot_head()}


def _check_then_read(state: State, head: Mapping[str, Any]) -> None:
    names: Sequence[str] = head.get("then_read") or ()
    if names:
        state.store.get(names)


def _owned(gradient: Gradient) -> Gradient:
    """The same, in memory that the next message does not overwrite."""
    rows = None if gradient.rows is None else np.array(gradient.rows)
    return replace(gradient, values=np.array(gradient.values), rows=rows)
