"""A SIGTERM that comes when the processes of a group can no longer stop together."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from meshwright import _compat
from meshwright.run import stopping
from meshwright.run.stopping import Stopping


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_after_the_last_question_reaches_the_program(fails, monkeypatch):
    heard, passed_on = _compat.Heard(), list[int]()

    @contextlib.contextmanager
    def hearing() -> Iterator[_compat.Heard]:
        yield heard

    monkeypatch.setattr(stopping, "_several_processes", lambda: True)
    monkeypatch.setattr(stopping, "_any_process", lambda flag: flag)
    monkeypatch.setattr(_compat, "hearing_sigterm", hearing)
    before = signal.signal(signal.SIGTERM, lambda number, _: passed_on.append(number))
    try:
        with contextlib.suppress(ValueError), Stopping(saves=True) as asked:
            asked.finish()
            heard.here = True
            if fails:
                raise ValueError
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not asked.is_asked
    assert passed_on == ([] if fails else [signal.SIGTERM])


def test_a_handler_of_python_is_called_once(monkeypatch):
    distributed = pytest.importorskip("jax._src.distributed")
    monkeypatch.setattr(distributed.global_state, "preemption_sync_manager", object())
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    try:
        with _compat.hearing_sigterm(), _compat.hearing_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [signal.SIGTERM] * 2
