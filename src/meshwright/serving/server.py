"""``mw.Server``: one or several models, their versions, and the traffic between these."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from ..errors import ModelError, NotReadyError, UnknownModelError
from ..planning.cache import folder
from ..planning.search.plan import Plan
from ..program import Program
from ..warn import warn
from .api import Answer
from .model import LoadedModel
from .options import ServeOptions
from .processes import Followers, follow
from .source import source_of
from .versions import Versions

_KEEP_ALL = {  # small models compile in less time than JAX' own limit, one second
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

_UNTRAINED = (
    "program {name!r} is served with the values that it begins with. Where it was trained, pass "
    "the checkpoints of its run, checkpoint='runs/first', or the state of its Trainer, "
    "params=state; where these values are meant, pass them as params=."
)


class Server:
    """Serves the forward pass of a model on a mesh; what requests send is put into batches.

    ``model`` is a Keras model, a ``.keras`` file, a :class:`~meshwright.Program`, or a function
    ``(params, inputs)`` with ``params``. ``build`` is a function that returns a model, as
    ``meshwright dry-run`` takes it; the model is built as shapes only, and its values come from
    ``checkpoint``, a run's directory or one checkpoint, which may stand first as well:
    ``Server("runs/first", build=build)``. ``strategy`` lays it out: a :class:`~meshwright.Sharded`,
    a :class:`~meshwright.Placement`, a :class:`~meshwright.Plan` or the file of one, or a mesh;
    without one it lies on the first device. ``params`` are the values of a Program, as well: a tree
    of its parameters, or the state of a :class:`~meshwright.Trainer` on any mesh, of which each
    device gets its pieces; newer ones take their place by ``server.model(name).update(params)``.
    A strategy with a :class:`~meshwright.Pipeline` is served by stages. A plan for latency or
    throughput also gives ``buckets`` and ``precision``, unless ``options`` do. Each device reads
    its own pieces of the weights and nothing else; slots are left out. With the
    :class:`~meshwright.ParameterServer` that trains the model, weights and rows of tables are those
    of its servers. ``example`` is a batch of inputs, of which shapes and dtypes
    are looked at, where the model does not say them. ``name`` is that of the model, and ``version``
    stands in each answer; without it, the step of the checkpoint does. ``options`` are those of
    :class:`~meshwright.serving.options.ServeOptions`: ``max_rows``, ``buckets``, ``lengths``,
    ``wait_s``, ``queue_rows``, ``timeout_s``, ``finite``, ``precision``, ``follow_s``,
    ``in_flight``.

    With ``precision`` ("bfloat16", "float16", or "int8": of Keras models by their quantization, of
    others their matrices, with a scale for each index of the last dim) parameters take fewer bits;
    ``sample``, inputs by name, is then answered in both types, and the ``differences``
    of the loaded model say how far the answers are apart.

    Rows of several requests are computed together where the traced model leaves them alone.
    :meth:`load` restores and compiles; ``with`` does so, and drains at the end. Raises
    :class:`~meshwright.ModelError` for what cannot be served.

    >>> import jax.numpy as jnp, numpy as np, meshwright as mw
    >>> def double(params, x):
    ...     return {"twice": x * params["two"]}
    >>> with mw.Server(double, params={"two": 2.0}, example=np.ones([1, 3], "float32")) as server:
    ...     server.answer({"input": [[1.0, 2.0, 3.0]]}).outputs["twice"].tolist()
    [[2.0, 4.0, 6.0]]
    """

    def __init__(
        self,
        model: Any = None,
        strategy: Any = None,
        *,
        build: Callable[[], Any] | None = None,
        checkpoint: str | Path | None = None,
        params: Any = None,
        example: Any = None,
        name: str | None = None,
        version: str | None = None,
        sample: Any = None,
        **options: Any,
    ) -> None:
        self._versions: dict[str, Versions] = {}
        self._lock = threading.Lock()  # one model is added, or all are loaded, at a time
        self._followers: Followers | None = None
        self._is_running = False
        if model is not None or build is not None:
            self.add(
                model,
                strategy,
                build=build,
                checkpoint=checkpoint,
                params=params,
                example=example,
                name=name,
                version=version,
                sample=sample,
                **options,
            )

    def add(
        self,
        model: Any = None,
        strategy: Any = None,
        *,
        build: Callable[[], Any] | None = None,
        checkpoint: str | Path | None = None,
        params: Any = None,
        example: Any = None,
        name: str | None = None,
        version: str | None = None,
        sample: Any = None,
        share: float | None = None,
        compare: float = 0.0,
        **options: Any,
    ) -> LoadedModel:
        """Serve one more model, or one more version of a model by the same ``name``.

        ``share`` is the part of the requests that this version answers, from 0 to 1; the first
        version has the rest. ``compare`` is the part of the other requests that it computes, too,
        so that the answers can be compared: :meth:`compared`. A server that runs loads it first and
        gives it requests then; over several processes all models must be added before.
        Raises :class:`~meshwright.ModelError`, and what :meth:`load` does.
        """
        if self._followers is not None:
            raise ModelError(
                "a server over several processes that runs takes no more models. Add them all, in "
                "every process, before load()."
            )
        _check_no_plan(model)
        if isinstance(strategy, str | Path):
            strategy = Plan.load(strategy)
        if build is not None and checkpoint is None and isinstance(model, str | Path):
            model, checkpoint = None, model
        if checkpoint is not None and params is not None and (build or isinstance(model, Program)):
            raise ModelError(
                f"values are both in checkpoint={str(checkpoint)!r} and in params=: leave one out."
            )
        settings = ServeOptions.of(_planned(strategy, options))
        what = {"build": build, "params": params, "example": example, "name": name}
        source = source_of(model, strategy, **what, precision=settings.precision)
        if source.is_untrained and checkpoint is None:
            warn(_UNTRAINED.format(name=source.name))
        own = None
        if settings.precision is not None and sample is not None:
            own = source_of(model, strategy, **what)
        loaded = LoadedModel(
            source, settings, checkpoint=checkpoint, version=version, sample=sample, own=own
        )
        with self._lock:
            versions = self._versions.get(loaded.name) or Versions(loaded.name)
            versions.check(loaded, share, compare)
            if self._is_running:
                loaded.load()  # requests are answered meanwhile
            versions.add(loaded, share, compare)
            self._versions = {**self._versions, loaded.name: versions}  # as others may read it
        return loaded

    def __repr__(self) -> str:
        models = [f"{m.name} {m.version}{'' if m.ready else ' (not ready)'}" for m in self._models]
        return f"Server({', '.join(models)})"

    # What a face asks

    @property
    def ready(self) -> bool:
        """Whether every model answers."""
        models = self._models
        return bool(models) and all(model.ready for model in models)

    def names(self) -> tuple[str, ...]:
        """The models, in the order in which they were added."""
        return tuple(self._versions)

    def versions(self, name: str) -> tuple[str, ...]:
        """The versions of a model, the one with most of the traffic first."""
        return self._of(name).names()

    def model(self, name: str, version: str | None = None) -> LoadedModel:
        """A version of a model; without ``version``, the one that the next request falls to.

        Raises :class:`~meshwright.UnknownModelError`.
        """
        return self._of(name).model(version)

    def compared(self, name: str) -> dict[str, float]:
        """The largest difference from the first version, by output, of versions with ``compare``.

        Keys are ``version/output``. Raises :class:`~meshwright.UnknownModelError`.
        """
        return self._of(name).compared()

    async def start(self) -> None:
        """:meth:`load` beside an event loop."""
        await asyncio.to_thread(self.load)

    async def drain(self) -> None:
        """:meth:`close` beside an event loop."""
        await asyncio.to_thread(self.close)

    # The same without an event loop

    def load(self) -> None:
        """Restore and compile every model; returns once all of them are ready.

        Raises :class:`~meshwright.CheckpointError` and :class:`~meshwright.ModelError`.
        """
        if not self._versions:
            raise ModelError("the server has no model: Server(model, ...), or server.add(...).")
        keep_compiled()
        with self._lock:
            models = self._models
            for model in models:
                model.load()
            self._is_running = True
            if jax.process_count() > 1 and jax.process_index() == 0 and self._followers is None:
                self._lead(models)

    def work(self) -> None:
        """Compute with rank 0 until it stops: what the other processes of a group do.

        The program of a group loads its server in every process; rank 0 then takes requests.
        """
        models = self._models
        follow(lambda word, arrays, reply: models[word["model"]].follow(word, arrays, reply))
        for model in models:
            model.close()

    @property
    def _models(self) -> list[LoadedModel]:
        return [model for versions in self._versions.values() for model in versions.all]

    def _lead(self, models: list[LoadedModel]) -> None:
        def lose(error: NotReadyError) -> None:
            for model in models:
                model.lose(error)

        def hear(word: dict[str, Any], arrays: list[Any]) -> None:
            models[word["model"]].answered(word, arrays)

        self._followers = Followers(lose, hear)
        for number, model in enumerate(models):
            followers, count = self._followers, jax.process_count() - 1
            model.lead(followers.tell, number, count, followers.missing)

    def answer(
        self, inputs: Any, *, name: str | None = None, timeout_s: float | None = None
    ) -> Answer:
        """The answer for some rows, from a thread or a script; ``inputs`` by name.

        Without ``name`` the only model answers. Raises :class:`~meshwright.UnknownModelError`
        where there are several, and what :meth:`~meshwright.serving.api.ServedModel.predict` does.
        """
        if name is None and len(self._versions) != 1:
            raise UnknownModelError(f"name one of the models: {', '.join(self._versions)}.")
        model: Any = self._of(name or next(iter(self._versions))).chosen()
        return model.answer(inputs, timeout_s=timeout_s)

    def close(self) -> None:
        """Refuse new requests, answer what was accepted, and stop."""
        self._is_running = False
        models = self._models
        with ThreadPoolExecutor(max(len(models), 1)) as pool:
            list(pool.map(lambda model: model.close(), models))
        if self._followers is not None:
            self._followers.close()
            self._followers = None

    def __enter__(self) -> Server:
        self.load()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of(self, name: str) -> Versions:
        versions = self._versions.get(name)
        if versions is None:
            names = ", ".join(self._versions) or "none"
            raise UnknownModelError(f"unknown model {name!r}; models of this server: {names}.")
        return versions


def _check_no_plan(model: Any) -> None:
    if isinstance(model, str | Path) and Path(model).suffix == ".json":
        raise ModelError(
            f"{model} is a plan, not a model: it goes in as the strategy, "
            f"Server(model, {str(model)!r})."
        )


def _planned(strategy: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a server, with the batches and the precision of a plan for serving."""
    serving = strategy.serving if isinstance(strategy, Plan) else None
    if serving is None:
        return dict(options)
    sized = options.keys() & {"buckets", "max_rows"}
    sizes = {} if sized else {"buckets": serving.buckets, "max_rows": serving.buckets[-1]}
    return {**sizes, "precision": serving.precision, **options}


def keep_compiled() -> None:
    """Let JAX keep what it compiles on disk, however quickly it was compiled.

    A second start then only traces. ``MESHWRIGHT_CACHE`` names the folder or switches it off; a
    folder that JAX has been given already stays.
    """
    root = folder()
    if root is None:
        return
    for name, value in _KEEP_ALL.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    config: Any = jax.config
    if config.jax_compilation_cache_dir:  # which reads the environment, too
        return
    compilation_cache.set_cache_dir(str(root / "xla"))
    compilation_cache.reset_cache()  # it may have looked before, and found none
