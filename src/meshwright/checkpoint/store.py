"""The checkpoints of one run: the newest few, in one directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..program import TrainState
from ..units import bytes_text
from . import files
from .claims import claimed, is_held, make_directory, not_writable
from .record import (
    PARTS,
    CheckpointInfo,
    Position,
    as_directory,
    check_same,
    complete_names,
    is_leftover_name,
    list_checkpoints,
    newest,
    path_for,
    readable_checkpoints,
)
from .snapshot import as_saved, describe, rounded, snapshot, spread_again, to_host

_NOWHERE = Position()


class Checkpoints:
    """The checkpoints of one run in one directory; the newest ``keep`` are kept, ``None`` all.

    ``save`` returns at once: it copies the arrays on their devices, and a thread writes them with
    Orbax while training goes on. A checkpoint gets its name only when it is complete, and an older
    one is removed only then. Several processes write what they hold, each, to a directory that all
    of them see, and all of them must call ``save`` and ``restore`` alike. Raises
    :class:`~meshwright.CheckpointError` for another ``keep``.

    >>> import tempfile, jax, numpy as np, meshwright as mw
    >>> rows = mw.Layout(["batch", None], mw.create_mesh({"batch": 8}))
    >>> cols = mw.Layout([None, "model"], mw.create_mesh({"model": 2}, devices=jax.devices()[:2]))
    >>> w = jax.device_put(np.arange(32.0).reshape(8, 4), rows.sharding)
    >>> with mw.Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
    ...     for step in (1, 2, 3):
    ...         checkpoints.save(step, mw.TrainState({"w": w * step}, {}, {}, {}))
    >>> [info.step for info in checkpoints.all]
    [2, 3]
    >>> there = jax.ShapeDtypeStruct((8, 4), w.dtype, sharding=cols.sharding)
    >>> restored = checkpoints.restore(mw.TrainState({"w": there}, {}, {}, {}))
    >>> restored.params["w"].sharding.shard_shape((8, 4)), float(restored.params["w"].sum())
    ((8, 2), 1488.0)
    """

    def __init__(self, directory: str | Path, keep: int | None = 3) -> None:
        if keep is not None and not (isinstance(keep, int) and keep >= 1):
            raise CheckpointError(
                f"keep={keep!r}: expected a whole number, at least 1, or None to keep all: the "
                "newest checkpoint is always kept."
            )
        files.require_orbax()  # now, and not at the first save after hours of training
        self.directory = as_directory(directory)
        self.keep = keep
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        self._nbytes = 0  # of the one under way
        self._names: set[str] | None = None  # that are, or were, in the directory

    # Looking

    @property
    def all(self) -> tuple[CheckpointInfo, ...]:
        """The complete checkpoints, oldest first."""
        self.wait()
        return tuple(list_checkpoints(self.directory))

    @property
    def latest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint, or ``None``."""
        self.wait()
        return newest(self.directory)

    # Writing

    def save(
        self,
        step: int,
        state: TrainState,
        position: Position = _NOWHERE,
        *,
        layout: str = "",
        notes: Mapping[str, Any] | None = None,
        late_notes: Callable[[], Mapping[str, Any]] | None = None,
        dtype: str | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Write a state in the background; it may be donated as soon as this returns.

        Waits for the save before, if that is still being written. ``notes`` are JSON values;
        ``late_notes`` is called by the thread that writes, for what would wait for the devices,
        and ``then`` once the checkpoint is complete.
        ``dtype="bfloat16"`` rounds floating-point weights (the first two parts of the state).
        Raises :class:`~meshwright.CheckpointError` if the save before failed, and for a step that
        is not a whole number.
        """
        self.wait()
        step = _number_of(step)
        state = rounded(state, dtype)
        path, arrays = self._new_path(step), tuple(describe(state))
        info = CheckpointInfo(path, step, arrays, layout, position, dict(notes or {}), dtype=dtype)
        copies, self._nbytes = snapshot(state), info.nbytes
        self._thread = self._thread or ThreadPoolExecutor(1, "meshwright-checkpoint")
        self._under_way = self._thread.submit(self._write, info, copies, late_notes, then)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Around a run: no other process may write its run's checkpoints to the directory.

        Makes the directory. Raises :class:`~meshwright.CheckpointError` where another process has
        claimed it, or it cannot be written to.
        """
        if not _is_first_process():
            yield
            return
        with claimed(self.directory) as is_first:
            if is_first:
                _tidy(self.directory)
            yield

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises :class:`~meshwright.CheckpointError` if the last save failed.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        try:
            under_way.result()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"a checkpoint in {self.directory} could not be written: {self._reason(error)} The "
                "ones before are as they were."
            ) from error

    def abandon(self) -> None:
        """Leave what is being written unfinished: other processes that take part in it are gone."""
        thread, self._thread, self._under_way = self._thread, None, None
        if thread is not None:
            thread.shutdown(wait=False)

    def close(self) -> None:
        """Wait for what is being written, and end the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Reading

    def restore(self, like: TrainState, info: CheckpointInfo | None = None) -> TrainState:
        """The state of a checkpoint (the newest, unless ``info`` names one), laid out as ``like``.

        ``like`` holds arrays, or ``jax.ShapeDtypeStruct`` with a sharding, of whatever mesh; parts
        that are empty there are not restored. Every process reads the pieces that its devices
        need. Raises :class:`~meshwright.CheckpointError` that lists all names, shapes and dtypes
        which differ, before anything is read.
        """
        info = info or self.latest
        if info is None:
            raise CheckpointError(f"{self.directory} holds no complete checkpoint.")
        return restore_state(info, like, self._files)

    # How it is done

    @functools.cached_property
    def _files(self) -> Any:
        return files.make_checkpointer()

    def _reason(self, error: Exception) -> str:
        """Why the last save failed: Orbax takes a page to say that a disk is full."""
        with contextlib.suppress(OSError):  # of a directory that is gone
            free_bytes = shutil.disk_usage(self.directory).free
            if free_bytes < self._nbytes:
                return (
                    f"its disk has {bytes_text(free_bytes)} left, and a checkpoint takes "
                    f"{bytes_text(self._nbytes)}. Free some space."
                )
        return f"{str(error).rstrip('.')}."

    def _new_path(self, step: int) -> Path:
        if self._names is None:
            if _is_first_process():
                make_directory(self.directory)
                if not is_held(self.directory):  # a run may be writing there
                    _tidy(self.directory)
            self._names = complete_names(self.directory)
        path = path_for(self.directory, step, self._names)
        self._names.add(path.name)
        return path

    def _write(
        self,
        info: CheckpointInfo,
        copies: dict[str, Any],
        late_notes: Callable[[], Mapping[str, Any]] | None,
        then: Callable[[], None] | None,
    ) -> None:
        if late_notes is not None:
            info = dataclasses.replace(info, notes={**info.notes, **late_notes()})
        files.write(self._files, to_host(copies), info)
        if then is not None:
            then()
        if self.keep is not None and _is_first_process():
            for old in readable_checkpoints(self.directory)[: -self.keep]:
                files.remove(old.directory)


def restore_state(
    info: CheckpointInfo,
    like: TrainState,
    checkpointer: Any = None,
    whole: TrainState | None = None,
) -> TrainState:
    """See :meth:`Checkpoints.restore`; ``whole`` has all arrays where ``like`` has some of them."""
    target, like = like, as_saved(info, like)
    arrays = describe(like)
    check_same(info, arrays if whole is None else describe(whole))
    leaves = [value for part in like for value in part.values()]
    by_key = {array.key: value for array, value in zip(arrays, leaves, strict=True)}
    restored = files.read(checkpointer or files.make_checkpointer(), info, by_key)
    parts = zip(PARTS, like, strict=True)
    state = TrainState(
        *({path: restored[f"{part}/{path}"] for path in paths} for part, paths in parts)
    )
    return spread_again(state, target)


def _number_of(step: Any) -> int:
    """A step as an ``int``; any other would have a name that is not looked for."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(
            f"step={step!r}: expected a whole number, at least 0, by which checkpoints are ordered."
        )
    return number


def _tidy(directory: Path) -> None:
    """Remove what a killed writer left there half done."""
    try:
        for path in directory.iterdir():
            if is_leftover_name(path.name):
                files.remove(path)
    except OSError as error:
        raise not_writable(directory, error) from error


def _is_first_process() -> bool:
    import jax

    return jax.process_index() == 0
