"""Ask a server's core, as a client does, and raise what it says went wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.ps.server.core import ServerCore
from meshwright.ps.wire.failures import raise_failure
from meshwright.ps.wire.message import Message


class Asking:
    """A core, and what is said to it."""

    def __init__(self, core: ServerCore | None = None) -> None:
        self.core = core or ServerCore()
        self._numbers = itertools.count(1)

    def ask(self, kind: str, *arrays: Any, peer: str = "worker:0", **head: Any) -> Message:
        answer = self.ask_later(kind, *arrays, peer=peer, **head)
        assert answer is not None
        return answer

    def ask_later(
        self, kind: str, *arrays: Any, peer: str = "worker:0", **head: Any
    ) -> Message | None:
        sent = Message(kind, {"id": next(self._numbers), **head}, tuple(map(np.asarray, arrays)))
        answer = self.core.handle(peer, sent)
        if answer is not None and answer.kind == "error":
            raise_failure(answer)
        return answer

    def value(self, name: str, value: Any) -> None:
        value = np.asarray(value)
        head = {"name": name, "shape": list(value.shape), "dtype": value.dtype.str}
        assert self.ask("create", value, **head, init={"kind": "value"}).head["made"]

    def table(self, name: str, shape: Sequence[int], dtype: str = "float32", **init: Any) -> bool:
        init = {"kind": "zeros", **init}
        answer = self.ask("create", name=name, shape=list(shape), dtype=dtype, init=init)
        return answer.head["made"]

    def read(self, *names: str, **head: Any) -> list[np.ndarray]:
        return list(self.ask("read", names=list(names), **head).arrays)

    def push(self, *updates: tuple, step: int | None = None, **head: Any) -> dict[str, Any]:
        """Each update is (name, op, arrays) or (name, op, arrays, options)."""
        entries = [[name, op, len(arrays), *(more or [{}])] for name, op, arrays, *more in updates]
        arrays = [array for update in updates for array in update[2]]
        return dict(self.ask("push", *arrays, step=step, updates=entries, **head).head)

    def optimizer(self, name: str, names: Sequence[str], **config: Any) -> dict[str, Any]:
        serialized = {"class_name": name, "config": config}
        return dict(self.ask("optimizer", group="g", config=serialized, names=list(names)).head)
