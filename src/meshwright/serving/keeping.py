"""The weights that a model is served with: the first ones, and newer ones in their place."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import CheckpointInfo, read_checkpoint, written_as
from ..errors import CheckpointError, MeshwrightError, ModelError, NotReadyError
from .batches import first_line
from .exports import (
    Export,
    LayeredRows,
    about_of,
    base_written_as,
    export_at,
    exports_in,
    fulls_in,
    laid_out,
    next_after,
    read_weights,
)
from .figures import Figures
from .following import (
    FirstChoice,
    Others,
    Refusals,
    cannot_be_served,
    raise_everywhere,
    reply_to,
)
from .handover import Moved
from .options import ServeOptions
from .turns import turn
from .weights import Weights, bytes_by_device, not_finite, states_of

_LOGGER = logging.getLogger("meshwright.serving")
Reply = Callable[[dict[str, Any], list[np.ndarray]], None]


class Keeper:
    """Weights of one model, of which ``weights`` are those of the next batch.

    :meth:`follow` looks for newer ones in a thread of its own. In a group of processes rank 0 has
    ``others``, with whom it agrees on a checkpoint before any of them computes with it.
    """

    def __init__(
        self,
        source: Any,
        options: ServeOptions,
        figures: Figures,
        *,
        checkpoint: str | Path | None = None,
        version: str | None = None,
    ) -> None:
        self.source, self._options, self._figures = source, options, figures
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self._asked_version = version
        self.first_version = version or ""  # by which counts go on when weights are swapped
        self.weights: Weights | None = None
        self.moved: Moved | None = None
        self.others: Others | None = None  # processes that follow this one, which is rank 0
        self.missing: Callable[[], str | None] = lambda: None  # which of them
        self._directory: Path | None = None  # of the checkpoint that is served,
        self._written: Any = None  # which tells it from one written there later
        self._export: Export | None = None  # that is served, of a folder of these
        self._refusals = Refusals(options.follow_s)
        self._reloading = threading.Lock()
        self._stopping = threading.Event()
        self._follower: threading.Thread | None = None
        self._read: dict[int, Weights] = {}  # of a process that follows, by the request of rank 0
        self._next: Weights | None = None  # finished, for a batch to come

    @property
    def version(self) -> str:
        """That of the weights which the next batch is computed with."""
        return self.weights.version if self.weights else self._asked_version or ""

    def begin(self) -> None:
        """Follow newer weights, where there may be some and the options ask for it.

        In a group rank 0 alone does so, once it has ``others``.
        """
        import jax

        self.first_version = self.first_version or self.version
        self._stopping.clear()
        has_newer = self.checkpoint is not None or self.source.live is not None
        is_led = self.others is not None or jax.process_count() == 1
        if is_led and has_newer and self._options.follow_s is not None:
            self._follower = threading.Thread(
                target=self._follow, name=f"meshwright-follow-{self.source.name}", daemon=True
            )
            self._follower.start()

    def stop(self) -> None:
        """Give up what is being read; :meth:`end` waits for it."""
        self._stopping.set()

    def end(self) -> None:
        """Wait for the thread that follows, and end the connections to parameter servers."""
        if self._follower is not None:
            self._follower.join()
            self._follower = None
        if self.source.live is not None:
            self.source.live.close()

    # The first ones

    def first(self) -> Weights:
        """The weights to begin with. Raises what ``load`` raises."""
        import jax

        if self.checkpoint is None:
            state, self.moved = self.source.in_memory()
            return self._checked(Weights(self._asked_version or "1", state, self.source.live))
        choice = FirstChoice(self.checkpoint, may_be_older=self._options.follow_s is not None)
        for directory in choice:
            try:
                self.weights = self._first_from(directory)
            except MeshwrightError as error:
                choice.failed(error)
                self._refuse(directory, error)
                continue
            if jax.process_count() == 1:
                self.catch_up()
            return self.weights
        raise choice.failure

    def catch_up(self) -> None:
        """Serve the deltas after the export that the server began with, as far as they go."""
        if self._export is not None:
            with suppress(MeshwrightError):  # it has been noted
                self.reload()

    def _first_from(self, directory: Path) -> Weights:
        """The weights of this checkpoint, once every process has read it."""
        export = export_at(directory)
        written = written_as(directory) if export is None else base_written_as(export)
        fault, read = None, None
        try:
            read = self._read_at(directory)
        except Exception as error:
            fault = cannot_be_served(directory, error)
        raise_everywhere(fault)
        assert read is not None
        weights = self._finished(read, self._asked_version)
        self._directory, self._export, self._written = directory, export, written
        _LOGGER.info(
            f"version {weights.version}: read {self.moved}",
            extra={"fields": {"model": self.source.name}},
        )
        return weights

    # In a process that follows rank 0

    def named(self, version: str) -> Weights:
        """The weights that rank 0 computes this batch with."""
        assert self.weights is not None
        if version != self.weights.version:
            assert self._next is not None
            self.weights = self._next
        return self.weights

    def do(self, word: dict[str, Any], reply: Reply) -> None:
        """Read a checkpoint, beside the batches, or finish what was read, among them."""
        if word["do"] == "read":
            arguments = (self._read_as_asked, word, reply)
            threading.Thread(target=self._do, args=arguments, daemon=True).start()
        else:
            self._do(self._finish_as_asked, word, reply)

    @staticmethod
    def _do(do: Callable[[dict[str, Any]], None], word: dict[str, Any], reply: Any) -> None:
        """Do it and reply; what goes wrong is for rank 0 to say."""
        fault = None
        try:
            do(word)
        except Exception as error:
            fault = cannot_be_served(Path(word["directory"]), error)
        reply(reply_to(word, fault), [])

    def _read_as_asked(self, word: dict[str, Any]) -> None:
        self._read.clear()
        self._read[word["request"]] = self._read_at(Path(word["directory"]))

    def _finish_as_asked(self, word: dict[str, Any]) -> None:
        self._next = self._finished(self._read.pop(word["read"]))

    # Newer ones

    def update(self, params: Any = None) -> Moved:
        """See :meth:`~.model.LoadedModel.update`."""
        if self.others is not None:
            raise ModelError(
                f"model {self.source.name!r} is served by several processes, which take newer "
                "weights from checkpoints alone. Save one, and call reload()."
            )
        if (params is None) != (self.source.given is None):
            raise ModelError(
                f"model {self.source.name!r} is one of Keras, which has its values itself: train "
                "it, and call update() without params."
                if self.source.given is None
                else f"{self.source.name!r} is a Program or a function, which has no newer values "
                "itself: update(params), with a tree of parameters or the state of a Trainer."
            )
        with self._reloading:
            state, moved = self.source.in_memory(params)
            number = int(self.version) + 1 if self.version.isdecimal() else 1
            weights = Weights(str(number), state, self.source.live)
            self._swap(self._checked(weights), f"handed over: {moved}")
            self.moved = moved
        return moved

    def reload(self) -> bool:
        """See :meth:`~.model.LoadedModel.reload`."""
        assert self.checkpoint is not None
        with self._reloading:
            if self._export is not None:
                return self._later_exports(self.checkpoint)
            info = read_checkpoint(self.checkpoint)
            written = written_as(info.directory)  # before it is read: it may be replaced then
            if self._is_served(info, written):
                self._figures.refusal = ""
                return False
            if self._refusals.holds(info.directory):
                return False
            read = functools.partial(self._read_from, info)
            weights = self._read_or_refuse(info.directory, read)
            self._directory, self._written = info.directory, written
            self._swap(weights, f"read {self.moved}")
            return True

    def _read_or_refuse(self, path: Path, read: Callable[[], Weights]) -> Weights:
        """Weights that are read in all processes; what cannot be served is not tried again."""
        try:
            return self._from_everywhere(path, read)
        except NotReadyError:  # of the other processes, or this one is stopping
            raise
        except Exception as error:
            failure = cannot_be_served(path, error)
            self._refuse(path, failure)
            raise failure from failure.__cause__

    def _is_served(self, info: CheckpointInfo, written: Any) -> bool:
        """Whether this is the checkpoint that is served.

        Another run may have begun in the directory, and have come to the same step.
        """
        is_replaced = info.directory == self._directory and written != self._written
        # A group tells weights apart by their versions.
        is_same_version = self.others is not None and str(info.step) == self.version
        if is_replaced and is_same_version:
            raise _written_anew(info.directory, f"step {info.step}")
        return is_same_version or (info.directory == self._directory and not is_replaced)

    # Of a folder of exports

    def _check_serves_exports(self, directory: Path) -> None:
        import jax

        faults = []
        if self.source.tables is None:
            faults.append("the model has no tables on parameter servers (mw.ps.Embedding)")
        if self.source.stages is not None:
            faults.append("stages are not supported")
        if jax.process_count() > 1 and (self._asked_version or "").isdecimal():
            faults.append(
                f"version={self._asked_version!r} is the number of an export, by which several "
                "processes tell weights apart; leave it out, or choose a name"
            )
        if faults:
            raise ModelError(
                f"the exports in {directory} cannot be served as model {self.source.name!r}: "
                f"{'; '.join(faults)}. Serve the model that was exported, without stages, or "
                "serve a folder of checkpoints."
            )

    def _later_exports(self, directory: Path) -> bool:
        """Serve each export after the present one in turn; whether there was one."""
        before = self._export
        while not self._stopping.is_set() and self._export is not None:
            try:
                export = self._next_export(directory, self._export)
            except CheckpointError as error:
                self._say_refused(f"refused what is after {self._export}: {first_line(error)}")
                raise
            if export is None or self._refusals.holds(export.path):
                break
            rows = None if export.kind == "full" or self.weights is None else self.weights.rows
            written = base_written_as(export)
            read = functools.partial(self._read_export, export, rows)
            weights = self._read_or_refuse(export.path, read)
            self._export, self._written = export, written
            self._swap(weights, f"read {self.moved} of {export}")
        return self._export is not before

    def _next_export(self, directory: Path, present: Export) -> Export | None:
        """The export to serve next: of the run of the present one, or of another run that has begun
        to export in the folder."""
        written = base_written_as(present)
        is_gone = written is None and present not in exports_in(directory)
        if written == self._written or (written is None and not is_gone):
            return next_after(directory, present)
        export = next(iter(fulls_in(directory)), None)
        if export and self.others is not None and export.number == present.number:
            raise _written_anew(export.path, f"export {export.number}")
        return export

    def _read_export(self, export: Export, below: Any) -> Weights:
        """The weights of an export, its rows upon those of the exports before it."""
        self._check_serves_exports(export.path.parent)
        about_of(export)
        state, self.moved = laid_out(self.source, read_weights(export))
        layer = self.source.tables.exported(export.path)
        rows = LayeredRows((layer,)) if below is None else below.and_then(layer)
        return Weights(str(export.number), state, rows)

    def _from_everywhere(self, directory: Path, read: Callable[[], Weights]) -> Weights:
        """The weights there, in every process that computes with them."""
        others, word = self.others, {"directory": str(directory)}
        if others is None:
            return self._finished(read())
        number = others.say({"do": "read", **word})
        weights = read()
        others.wait(self._why_stopped)
        with turn(self.source.whole_mesh):
            others.say({"do": "finish", "read": number, **word})
            weights = self._finished(weights)
        others.wait(self._why_stopped)
        return weights

    def _read_at(self, directory: Path) -> Weights:
        """What this checkpoint or export has. Rows of deltas before it are for rank 0 alone, which
        looks rows up for all."""
        export = export_at(directory)
        if export is not None:
            return self._read_export(export, None)
        return self._read_from(read_checkpoint(directory))

    def _why_stopped(self) -> str | None:
        return "the server is stopping" if self._stopping.is_set() else self.missing()

    def _swap(self, weights: Weights, how: str) -> None:
        before = self.version
        self.weights = weights  # a batch that is being computed keeps those that it began with
        self._figures.refusal = ""
        self.note(logging.INFO, f"version {before} -> {weights.version}: {how}")

    def _refuse(self, directory: Path, error: Exception) -> None:
        self._refusals.add(directory)
        self._say_refused(f"refused {directory.name}: {first_line(error)}")

    def _say_refused(self, text: str) -> None:
        """Note why the newest weights are not served, once."""
        if text != self._figures.refusal:
            self._figures.refusal = text
            self.note(logging.WARNING, text)

    def note(self, level: int, text: str) -> None:
        """An event of the model: in its status, and in the log."""
        self._figures.event(text)
        _LOGGER.log(level, text, extra={"fields": {"model": self.source.name}})

    def _read_from(self, info: CheckpointInfo) -> Weights:
        """The arrays and tables of a checkpoint, for :meth:`_finished`."""
        begin_s = time.perf_counter()
        read = Weights(str(info.step), self.source.read(info), self.source.saved_rows(info))
        arrived = sum(bytes_by_device(states_of(read.state)).values())
        self.moved = Moved(arrived, time.perf_counter() - begin_s)
        return read

    def _finished(self, read: Weights, version: str | None = None) -> Weights:
        """Weights as batches take them, from what was read."""
        state = self.source.finished(read.state)
        return self._checked(Weights(version or read.version, state, read.rows))

    def _checked(self, weights: Weights) -> Weights:
        if self._options.finite and (names := not_finite(weights.state)):
            raise CheckpointError(
                f"version {weights.version} has weights that are not finite: {', '.join(names)}. "
                "Serve an earlier checkpoint, or leave finite=True out."
            )
        return weights

    def _follow(self) -> None:
        """Look for newer weights until the server stops; whatever goes wrong, the present stay."""
        assert self._options.follow_s is not None
        while not self._stopping.wait(self._options.follow_s):
            try:
                self.reload() if self.checkpoint is not None else self.update()
            except Exception as error:
                if not self._stopping.is_set():
                    self._say_refused(_refusal_of(error, self._figures.refusal))


def _written_anew(path: Path, version: str) -> CheckpointError:
    """What a group says of weights that it cannot tell from those which it serves."""
    return CheckpointError(
        f"{path} is no longer the {version} that is served: another run wrote it. Servers of "
        "several processes tell weights apart by that number: save a later one, or restart."
    )


def _refusal_of(error: Exception, last: str) -> str:
    """What to note of an error, unless :meth:`Keeper.reload` has just said it."""
    text = first_line(error)
    return last if last.endswith(text) else f"no newer weights: {text}"
