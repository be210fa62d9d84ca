"""What ``meshwright serve`` does: a server from the words of the command line, run or written out.

Programs of platforms start here, too: :func:`app_of` for an ASGI host, ``_load_pyfunc`` for MLflow.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ServingError
from .extras import require
from .layouts.mesh import Mesh

if TYPE_CHECKING:
    from starlette.applications import Starlette


@dataclass(frozen=True)
class Asked:
    """The options of ``meshwright serve``."""

    source: Path
    build: str | None = None
    mesh: Mesh | None = None
    layouts: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    fd: int | None = None
    max_rows: int | None = None
    buckets: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    wait: float | None = None
    queue_rows: int | None = None
    timeout: float = 60.0
    finite: bool = False
    precision: str | None = None
    reload: float | None = None
    max_body: int = 64 << 20
    api_keys: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    drain: float = 0.0
    telemetry: bool = False

    @property
    def model_name(self) -> str:
        """The name in URLs: that of the run's folder or of the file."""
        if self.name:
            return self.name
        path = self.source.resolve()
        return path.parent.name if path.stem.isdigit() else path.stem


def run(asked: Asked) -> None:
    """Serve until SIGTERM. What can be wrong with the options is found before JAX starts."""
    _require()
    from .serving.http.run import Listening
    from .serving.http.run import run as run_app

    listening = Listening(
        asked.host,
        asked.port,
        asked.fd,
        asked.tls_certificate,
        asked.tls_key,
        asked.drain,
        asked.timeout,
    )
    run_app(lambda: app_for(asked), listening)


def app_for(asked: Asked) -> Starlette:
    """The app of these options; it starts the model when its lifespan does."""
    _require()
    from .serving.http.app import serving_app
    from .serving.http.keys import read_keys
    from .serving.http.limits import Limits

    keys = read_keys(asked.api_keys) if asked.api_keys else ()
    limits = Limits(
        body_bytes=asked.max_body,
        text_bytes=min(asked.max_body, Limits.text_bytes),
        pending_bytes=max(Limits.pending_bytes, 2 * asked.max_body),
        request_s=asked.timeout,
    )
    app = serving_app(_server(asked), limits=limits, keys=keys)
    if asked.telemetry:
        from .serving.http.telemetry import traced

        traced(app)
    return app


def app_of(words: Sequence[str]) -> Starlette:
    """The app for the words of ``meshwright serve``, for a host of ASGI apps."""
    from .commands.serve import asked_of

    return app_for(Asked(**asked_of(words)))


def write(
    asked: Asked, platform: str, folder: Path, image: str, words: Sequence[str]
) -> tuple[Path, ...]:
    """Write the files of a platform."""
    from importlib.metadata import version

    from .serving.platforms import Deployment, write_files

    name = asked.name or re.sub(r"[^a-z0-9]+", "-", asked.model_name.lower()).strip("-")
    deployment = Deployment(
        name,
        tuple(words),
        version("meshwright"),
        image,
        devices=asked.mesh.size if asked.mesh else 1,
    )
    return write_files(platform, deployment, folder)


def _require() -> None:
    require("uvicorn", ServingError, "serving takes Starlette and uvicorn", "serve")


def _server(asked: Asked) -> Any:
    raise NotImplementedError


# MLflow


def _load_pyfunc(path: str) -> _Pyfunc:
    """What MLflow calls for an MLmodel whose ``loader_module`` is this file."""
    import yaml

    record = yaml.safe_load((Path(path) / "MLmodel").read_text(encoding="utf-8"))
    from .commands.serve import asked_of

    return _Pyfunc(Asked(**asked_of(record["metadata"]["arguments"])))


class _Pyfunc:
    """A model as MLflow calls it; requests of several threads share batches."""

    def __init__(self, asked: Asked) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._name = asked.model_name
        self._server = _server(asked)
        self._wait(self._server.start())

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """Answers for a data frame, an array or arrays by name."""
        import numpy as np

        model = self._server.model(self._name)
        inputs = _arrays(model_input, model.inputs)
        answer = self._wait(model.predict(inputs))
        outputs = {name: np.asarray(value) for name, value in answer.outputs.items()}
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _arrays(given: Any, specs: Sequence[Any]) -> dict[str, Any]:
    """Arrays by name: columns of a data frame are inputs, or the elements of the only one."""
    import numpy as np

    names = [spec.name for spec in specs]
    if hasattr(given, "columns") and not set(names) & set(given.columns):
        given = given.to_numpy()
    if hasattr(given, "columns"):
        given = {name: np.array(given[name].tolist()) for name in given.columns}
    if not isinstance(given, Mapping):
        given = {names[0]: np.asarray(given)}
    arrays = {}
    for spec in specs:
        if spec.name in given:
            array = np.asarray(given[spec.name])
            arrays[spec.name] = array.astype(spec.dtype, casting="same_kind")
    return {**given, **arrays}
