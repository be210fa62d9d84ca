"""What the programs of platforms call: the server of the words of ``meshwright serve``.

BentoML and Ray Serve host the app of :func:`app_of`; MLflow calls ``_load_pyfunc``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .serve import options_of
from .serving import ServeOptions, app_for, server_for

if TYPE_CHECKING:
    from starlette.applications import Starlette


def app_of(words: Sequence[str]) -> Starlette:
    """The app for the words of ``meshwright serve``, for a host of ASGI apps."""
    return app_for(ServeOptions(**options_of(words)))


def _load_pyfunc(path: str) -> _Pyfunc:
    """What MLflow calls for an MLmodel whose ``loader_module`` is this file."""
    import yaml

    record = yaml.safe_load((Path(path) / "MLmodel").read_text(encoding="utf-8"))
    return _Pyfunc(ServeOptions(**options_of(record["metadata"]["arguments"])))


class _Pyfunc:
    """A model as MLflow calls it; requests of several threads share batches."""

    def __init__(self, options: ServeOptions) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._name = options.model_name
        self._server = server_for(options)
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


def _arrays(inputs: Any, specs: Sequence[Any]) -> dict[str, Any]:
    """Arrays by name: columns of a data frame are inputs, or the elements of the only one."""
    import numpy as np

    names = [spec.name for spec in specs]
    if hasattr(inputs, "columns") and not set(names) & set(inputs.columns):
        inputs = inputs.to_numpy()
    if hasattr(inputs, "columns"):
        inputs = {name: np.array(inputs[name].tolist()) for name in inputs.columns}
    if not isinstance(inputs, Mapping):
        inputs = {names[0]: np.asarray(inputs)}
    arrays = {}
    for spec in specs:
        if spec.name in inputs:
            array = np.asarray(inputs[spec.name])
            arrays[spec.name] = array.astype(spec.dtype, casting="same_kind")
    return {**inputs, **arrays}
