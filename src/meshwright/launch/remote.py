"""A process of a group on a host that Ray or Spark has chosen: the same agent as the launcher's.

What runs is a program with its arguments, or a function that travels by value. Each host runs its
part of the group (:func:`~.group.run_here`); they meet as hosts of ``meshwright launch`` do.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from ..errors import Preempted, ProcessError, ShippingError
from .failure import Failure
from .group import run_here
from .group_options import GroupOptions
from .joining import KEYS
from .keys import Keys
from .signals import PREEMPTED

CALL, PATHS, VALUE = "call", "paths.json", "value"  # files of a call, in a folder of its own


@dataclass(frozen=True)
class Work:
    """What every process runs: a program with its arguments, or else a pickled call.

    ``paths`` is where modules are imported from that the call refers to; ``keys`` are those of the
    group, which travel as safely as whatever Ray or Spark sends.
    """

    program: tuple[str, ...] = ()
    call: bytes = b""
    paths: tuple[str, ...] = ()
    keys: Keys = field(default_factory=Keys.make)

    @classmethod
    def of_call(cls, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
        """That of a function; :class:`~meshwright.ShippingError` if it cannot travel."""
        try:
            call = cloudpickle.dumps((function, args, kwargs))
        except Exception as error:  # whatever an object's __reduce__ raises
            name = getattr(function, "__name__", repr(function))
            raise ShippingError(
                f"{name} and its arguments cannot be sent to other processes: {error}. Pass what "
                "can be pickled, and open files and connections inside the function."
            ) from error
        return cls(call=call, paths=tuple(str(Path(path).resolve()) for path in sys.path))


@dataclass(frozen=True)
class Result:
    """How a process ended; ``value`` is what its function returned, pickled."""

    rank: int
    exit_code: int
    failure: Failure | None = None
    value: bytes = b""


def run_part(work: Work, options: GroupOptions, folder: Path) -> Result:
    """Run the one process of this host to its end, whatever that is; it finds its rows there."""
    arguments: Sequence[str] = work.program
    if work.call:
        (folder / CALL).write_bytes(work.call)
        (folder / PATHS).write_text(json.dumps(work.paths))
        arguments = ["-m", "meshwright.launch.call", str(folder)]
    work.keys.save(folder / "keys.json")
    with _variable(KEYS, str(folder / "keys.json")):
        end = run_here(arguments, options)
    sys.stdout.flush()
    returned = folder / VALUE
    value = returned.read_bytes() if returned.exists() else b""
    return Result(end.first_rank, end.code, end.failure, value)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Inside, this process and what it starts have this variable."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def values_of(results: Sequence[Result]) -> list[Any]:
    """What the functions returned, by rank.

    Raises :class:`~meshwright.ProcessError` for a process that failed, and
    :class:`~meshwright.Preempted` where they have saved and ended with exit code 75.
    """
    failures = [result.failure for result in results if result.failure is not None]
    if failures:
        raise failures[0].error()
    if any(result.exit_code == PREEMPTED for result in results):
        raise Preempted(PREEMPTED)
    for result in results:
        if result.exit_code:
            raise ProcessError(
                f"rank {result.rank} of {len(results)} ended with exit code {result.exit_code}.",
                rank=result.rank,
            )
    ordered = sorted(results, key=lambda result: result.rank)
    return [cloudpickle.loads(result.value) if result.value else None for result in ordered]


def attempts(
    max_restarts: int, once: Callable[[], list[Any]], note: Callable[[str], None]
) -> list[Any]:
    """Run the whole group, and again after a failure, ``max_restarts`` times at most."""
    for remaining in reversed(range(max_restarts + 1)):
        try:
            return once()
        except ProcessError as error:
            if not remaining:
                raise
            note(f"{str(error).splitlines()[0]} All processes are started again.")
    raise AssertionError
