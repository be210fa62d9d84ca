"""``mw.DeltaExporter``: what changed in a model with tables since the last export, in a folder.

Servers that follow the folder answer with what changed, without reading the tables again.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, ModelError
from .exports import ABOUT, Export, exports_in, folder_name, fulls_in, sums_of, write_weights
from .source import source_of

_PIECE_BYTES = 32 << 20  # of rows that are held at once


@dataclass(frozen=True)
class Exported:
    """What one export wrote: its rows of all tables, the keys that are gone, and its bytes.

    Example:
        >>> print(Exported(Path("exports/shop/full_00000001"), 1, "full", 50, 0, 2_000, 0.1))
        full export 1: 50 rows, 0 keys removed, 2,000 bytes in 0.100 s
    """

    path: Path
    number: int
    kind: str
    rows: int
    removed: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.kind} export {self.number}: {self.rows:,} rows, {self.removed:,} keys removed, "
            f"{self.nbytes:,} bytes in {self.seconds:.3f} s"
        )


class DeltaExporter:
    """Writes a model that a :class:`~meshwright.ParameterServer` trains for servers that follow.

    ``model`` is the Keras model, and ``strategy`` the parameter servers that train it.
    The first :meth:`export` is a full one, with all rows of the tables; later ones hold the rows
    that changed since, the keys that were removed, and the other weights. After ``full_every``
    deltas comes a full one again; of full ones with their deltas, the newest ``keep`` are kept. The
    next export is also a full one where a parameter server was started again, an export was
    removed, or this object is a new one. One object at a time writes into a ``directory``;
    ``with``, or :meth:`close`, ends its connections to the servers. Raises
    :class:`~meshwright.ModelError` for a model without tables on parameter servers.

    Example:
        >>> import keras, numpy as np, tempfile, meshwright as mw
        >>> users = keras.Input([], dtype="int32")
        >>> shop = keras.Model(users, mw.ps.Embedding("people", 2, "hash")(users), name="shop")
        >>> shop.compile("sgd", "mse")
        >>> with mw.ParameterServer() as strategy, tempfile.TemporaryDirectory() as folder:
        ...     with mw.DeltaExporter(shop, strategy, folder) as exporter:
        ...         kinds = [exporter.export().kind]
        ...         history = strategy.fit(shop, np.arange(4), np.ones([4, 2]), verbose=0)
        ...         kinds, exporter.export().rows
        (['full'], 4)
    """

    def __init__(
        self,
        model: Any,
        strategy: Any,
        directory: str | Path,
        *,
        full_every: int = 24,
        keep: int = 2,
    ) -> None:
        if full_every < 1 or keep < 1:
            raise ModelError(
                "full_every and keep must be 1 or more; received "
                f"full_every={full_every!r}, keep={keep!r}."
            )
        self._source = source_of(model, strategy)
        if self._source.live is None or not self._source.live.tables:
            raise ModelError(
                f"expected a model with tables on parameter servers (mw.ps.Embedding) and the "
                f"ParameterServer that trains it; received model {self._source.name!r} and "
                f"{strategy!r}. Other models are served from their checkpoints: fit(checkpoint=)."
            )
        self.directory = Path(directory)
        self._live = self._source.live
        self._full_every, self._keep = full_every, keep
        self._since: dict[str, Any] = {}  # by shard: when it was asked
        self._last: Export | None = None  # that this object wrote

    def export(self, *, full: bool = False) -> Exported:
        """Write what changed since the last one, or with ``full`` all rows.

        Call it where no step is under way, as at the end of an epoch, for a state that the model
        had at one time. Raises :class:`~meshwright.CheckpointError` where it cannot be written, and
        :class:`~meshwright.NotReadyError` where the servers do not answer; what changed is then in
        the next export.
        """
        begin_s = time.perf_counter()
        export, changed = self._next(full)
        restarts = self._restarts()
        self._write(export, changed)
        self._last = export
        shards = dict(shard for own in changed.values() for shard in own.items())
        # Of a server that was started again meanwhile, rows are older than its marks.
        is_same = restarts == self._restarts()
        self._since = {name: shard.until for name, shard in shards.items()} if is_same else {}
        self._remove_old()
        return Exported(
            export.path,
            export.number,
            export.kind,
            sum(len(shard.rows) for shard in shards.values()),
            sum(len(shard.removed) for shard in shards.values()),
            sum(path.stat().st_size for path in export.path.rglob("*") if path.is_file()),
            time.perf_counter() - begin_s,
        )

    def close(self) -> None:
        """End the connections to the parameter servers."""
        self._live.close()

    def __enter__(self) -> DeltaExporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, full: bool) -> tuple[Export, dict[str, dict[str, Any]]]:
        """The export to write, and what has changed in each shard of each table."""
        last, there = self._last, {export.number: export for export in exports_in(self.directory)}
        newest = max(there, default=0)
        if last is not None and newest > last.number:
            raise CheckpointError(
                f"{self.directory} has export {newest}, and this exporter wrote {last.number} "
                "last. One DeltaExporter at a time writes into a folder; choose another one."
            )
        number = max(newest, last.number if last else 0) + 1
        if not full and last is not None and self._may_go_on(last, there):
            changed = self._changed(self._since)
            if not any(shard.is_all for own in changed.values() for shard in own.values()):
                return self._named(number, last.base), changed
        return self._named(number, number), self._changed({})

    def _may_go_on(self, last: Export, there: Mapping[int, Export]) -> bool:
        """Whether a delta may follow: of what it builds on, nothing was removed."""
        is_whole = all(number in there for number in range(last.base, last.number + 1))
        return is_whole and last.number - last.base < self._full_every

    def _named(self, number: int, base: int) -> Export:
        return Export(self.directory / folder_name(number, base), number, base)

    def _restarts(self) -> Any:
        return self._live.ask(lambda servers: servers.restarts())

    def _changed(self, since: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What changed in each shard of each table."""
        from ..ps.shared.changing import changed_rows

        return {
            name: self._live.ask(lambda s, spec=spec: changed_rows(s, spec, since))
            for name, spec in self._live.tables.items()
        }

    def _write(self, export: Export, changed: Mapping[str, Mapping[str, Any]]) -> None:
        from ..ps.training.table_files import write_rows

        aside = self.directory / f".{export.path.name}.{uuid.uuid4().hex[:8]}"
        removed = {
            name: np.sort(np.concatenate([shard.removed for shard in own.values()]))
            for name, own in changed.items()
        }
        try:
            aside.mkdir(parents=True)
            write_weights(aside, self._weights())
            write_rows(aside, self._live.tables, lambda n: self._pieces(n, changed[n]), removed)
            identity = {"kind": export.kind, "number": export.number, "base": export.base}
            about = {**identity, "model": self._source.name, "files": sums_of(aside)}
            (aside / ABOUT).write_text(json.dumps(about), encoding="utf-8")
            aside.rename(export.path)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {export} to {export.path}: {error.strerror or error}."
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _weights(self) -> dict[str, dict[str, Any]]:
        """All other weights, by the names that they have in checkpoints."""
        state, names = self._live.values(), self._source.names or ({}, {})
        return {
            part: {own.get(path, path): value for path, value in values.items()}
            for part, own, values in zip(("params", "state"), names, state[:2], strict=True)
        }

    def _pieces(
        self, table: str, changed: Mapping[str, Any]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        spec = self._live.tables[table]
        row_bytes = np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape[1:]))
        step = max(1, _PIECE_BYTES // max(1, row_bytes))
        for shard in changed.values():
            for start in range(0, len(shard.rows), step):
                ids = shard.rows[start : start + step]
                yield ids, self._live.lookup(table, ids)

    def _remove_old(self) -> None:
        fulls = fulls_in(self.directory)
        oldest = fulls[: self._keep][-1].number
        for export in exports_in(self.directory):
            if export.base < oldest:
                shutil.rmtree(export.path, ignore_errors=True)
