"""One ASGI app for every contract: routes, and nothing that computes.

It is served by uvicorn (``meshwright serve``), mounted in another app, or hosted by BentoML or Ray.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from ...errors import MeshwrightError, NotReadyError, RequestError, ServingError
from ...views import view_of
from ..api import Answer, Models, ServedModel
from . import predicting
from .answers import json_response, problem_response
from .body import Pending
from .contracts import invocations, open_inference, tf_serving
from .contracts.request import Reply
from .contracts.request import Request as Asked
from .keys import ApiKeys, check_keys
from .limits import Limits
from .log import LOGGER, RequestLog
from .looking import all_of, looked_at
from .metrics import MEDIA_TYPE, Metrics
from .openapi import Paths, openapi
from .overview import overview_of

_AGAIN_S = 10.0  # between two starts, where the first one failed
_GET, _POST = ["GET"], ["POST"]


def serving_app(
    models: Models, *, limits: Limits | None = None, keys: Iterable[str] = ()
) -> Starlette:
    """An ASGI app that answers for ``models``, a :class:`mw.Server`, in every contract.

    Open Inference V2, TensorFlow Serving's REST, SageMaker's and MLflow's ``/invocations``, health,
    ``/metrics``, ``/openapi.json``, the same to read at ``/docs``, and a page at ``/``. ``limits``
    bounds what a request may ask for; with ``keys`` each request but a health check must bring one
    of them.

    Its lifespan starts the models and drains them. Mounted in another app it has none: the first
    request starts them then, unless the other lifespan does, and that one must drain them.

    Raises ServingError for keys that are too short, and for a model whose name has a slash.

    >>> import meshwright as mw, numpy as np
    >>> example = np.ones([1, 3], "float32")
    >>> server = mw.Server(lambda p, x: x * p["two"], params={"two": 2.0}, example=example)
    >>> app = mw.serving_app(server)  # for uvicorn, or starlette.routing.Mount("/models", app)
    >>> "/invocations" in [route.path for route in app.routes]
    True
    """
    secrets = tuple(keys)
    if secrets:
        check_keys(secrets, "keys")
    _check_names(models)
    face = _Face(models, limits or Limits())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            await face.start()
        except BaseException as error:
            app.state.failure = error
            raise
        try:
            yield
        finally:
            await face.drain()

    app = Starlette(
        routes=face.routes(),
        lifespan=lifespan,
        middleware=[
            Middleware(RequestLog, observe=face.metrics.observe),
            *([Middleware(ApiKeys, keys=secrets)] if secrets else []),
        ],
        exception_handlers={HTTPException: _unrouted, MeshwrightError: _refused},  # pyright: ignore
    )
    app.state.models = models
    return app


def _check_names(models: Models) -> None:
    if hidden := [name for name in models.names() if "/" in name]:
        raise ServingError(
            f"no path of a URL leads to a model whose name has a slash: {hidden[0]!r}. Give it "
            "another one, by name= or --name."
        )


async def _unrouted(http: Request, error: HTTPException) -> Response:
    """No such path, or not by this method."""
    fact = f"{http.method} {http.url.path[:200]}: {error.detail.lower()}. See /openapi.json."
    kind = (error.status_code, "not_found" if error.status_code == 404 else "method_not_allowed")
    response = problem_response(RequestError(fact), http.scope, kind)
    response.headers.update(error.headers or {})
    return response


async def _refused(http: Request, error: MeshwrightError) -> Response:
    return problem_response(error, http.scope)


class _Face:
    """The routes over one set of models."""

    def __init__(self, models: Models, limits: Limits) -> None:
        self._models = models
        self._limits = limits
        self._pending = Pending(limits)
        self._starting: asyncio.Task[None] | None = None
        self._again_s = 0.0  # when a start that failed may be tried again
        self.metrics = Metrics(models, self._pending)

    async def start(self) -> None:
        """Start the models, once."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._models.start())
        await asyncio.shield(self._starting)

    async def drain(self) -> None:
        """Answer what was accepted, and stop; the models can be started again."""
        self._starting = None
        await self._models.drain()

    def routes(self) -> list[Route]:
        """Every path."""
        predict = functools.partial(self._prediction, "tf_serving", self._tf_read, _tf_write)
        infer = functools.partial(self._prediction, "open_inference", self._v2_read, _v2_write)
        v1, v2 = "/v1/models/{model}", "/v2/models/{model}"
        of_version = "/versions/{version}"
        return [  # predictions first: each path is compared with those before it
            *(Route(f"{v}/infer", infer, methods=_POST) for v in (v2, v2 + of_version)),
            *(Route(f"{v}:predict", predict, methods=_POST) for v in (v1, v1 + of_version)),
            Route("/invocations", self._invocations, methods=_POST),
            Route("/", self._page, methods=_GET),
            Route("/openapi.json", self._openapi, methods=_GET),
            Route("/docs", self._paths, methods=_GET),
            Route("/metrics", self._metrics, methods=_GET),
            *(Route(path, self._ready, methods=_GET) for path in ("/v2/health/ready", "/health")),
            Route("/ping", self._ready, methods=_GET),
            Route("/v2/health/live", _live, methods=_GET),
            Route("/v2", _server_metadata, methods=_GET),
            *(Route(f"{v}/ready", self._model_ready, methods=_GET) for v in (v2, v2 + of_version)),
            *(Route(v, self._v2_metadata, methods=_GET) for v in (v2, v2 + of_version)),
            *(Route(f"{v}:predict", _only_post, methods=_GET) for v in (v1, v1 + of_version)),
            *(Route(f"{v}:{{verb}}", _only_predict, methods=_POST) for v in (v1, v1 + of_version)),
            *(Route(f"{v}/metadata", self._tf_meta, methods=_GET) for v in (v1, v1 + of_version)),
            *(Route(v, self._tf_status, methods=_GET) for v in (v1, v1 + of_version)),
        ]

    # Predictions

    async def _prediction(
        self,
        contract: str,
        read: predicting.Read,
        write: predicting.Write,
        http: Request,
        name: str | None = None,
    ) -> Response:
        http.scope["state"]["contract"] = contract
        self._start_if_mounted()
        version = http.path_params.get("version")
        return await predicting.answer(
            http,
            self._models,
            name or http.path_params["model"],
            version,
            read,
            write,
            self._limits,
            self._pending,
        )

    def _start_if_mounted(self) -> None:
        """The lifespan of an app that is mounted never runs. A start that failed is tried again.

        Raises NotReadyError after one that failed, until then.
        """
        task = self._starting
        has_failed = task is not None and task.done() and not _is_done_well(task)
        if has_failed and time.monotonic() < self._again_s:
            raise NotReadyError(
                f"the models did not start; the server's log says why. They are started again "
                f"within {_AGAIN_S:.0f} s of that."
            )
        if task is None or has_failed:
            self._starting = asyncio.ensure_future(self._models.start())
            self._starting.add_done_callback(self._has_started)

    def _has_started(self, task: asyncio.Task[None]) -> None:
        if not _is_done_well(task):
            self._again_s = time.monotonic() + _AGAIN_S
            why = "cancelled" if task.cancelled() else str(task.exception())
            LOGGER.error("the models did not start", extra={"fields": {"error": why}})

    def _v2_read(self, http: Request, body: bytes, model: ServedModel) -> Asked:
        length = http.headers.get(open_inference.HEADER)
        return open_inference.read(body, length, model.inputs, self._limits)

    def _tf_read(self, _http: Request, body: bytes, model: ServedModel) -> Asked:
        return tf_serving.read(body, model.inputs, self._limits)

    async def _invocations(self, http: Request) -> Response:
        return await self._prediction(
            "invocations", self._invoked, _invoked_write, http, self._model_of(http)
        )

    def _model_of(self, http: Request) -> str:
        """``?model=``, or the only one."""
        names = self._models.names()
        if name := http.query_params.get("model"):
            return name
        if len(names) != 1:
            listed = ", ".join(map(repr, names))
            raise RequestError(f"this server has {listed}: say which, /invocations?model=NAME.")
        return names[0]

    def _invoked(self, http: Request, body: bytes, model: ServedModel) -> Asked:
        kind, accept = http.headers.get("content-type", ""), http.headers.get("accept", "")
        return invocations.read(body, kind, accept, model.inputs, self._limits)

    # Health and descriptions

    async def _ready(self, http: Request) -> Response:
        self._start_if_mounted()
        if not self._models.ready or getattr(http.app.state, "draining", False):
            raise NotReadyError("the server is loading or draining. Try again later.")
        return json_response({"ready": True})

    async def _model_ready(self, http: Request) -> Response:
        if not self._served(http).ready:
            raise NotReadyError("the model is loading or draining. Try again later.")
        return json_response({"ready": True})

    def _served(self, http: Request) -> ServedModel:
        """The model that a path names; without a version the one with most of the traffic."""
        return looked_at(self._models, http.path_params["model"], http.path_params.get("version"))

    async def _v2_metadata(self, http: Request) -> Response:
        model = self._served(http)
        versions = self._models.versions(model.name)
        return json_response(open_inference.model_metadata(model, versions))

    async def _tf_status(self, http: Request) -> Response:
        model = self._served(http)
        is_one = "version" in http.path_params
        models = [model] if is_one else all_of(self._models, model.name)
        return json_response(tf_serving.status(models))

    async def _tf_meta(self, http: Request) -> Response:
        return json_response(tf_serving.metadata(self._served(http)))

    async def _openapi(self, _http: Request) -> Response:
        return json_response(openapi(self._models, _version()))

    async def _paths(self, _http: Request) -> Response:
        paths = Paths(openapi(self._models, _version()))
        return HTMLResponse(await asyncio.to_thread(view_of, paths, "page"))

    async def _metrics(self, _http: Request) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type=MEDIA_TYPE)

    async def _page(self, http: Request) -> Response:
        overview = overview_of(self._models, str(http.base_url).rstrip("/"))
        page = await asyncio.to_thread(view_of, overview, "page")
        return HTMLResponse(page)


def _is_done_well(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _v2_write(request: Asked, answer: Answer, model: ServedModel) -> Reply:
    return open_inference.write(request, answer, model.name)


def _tf_write(request: Asked, answer: Answer, _model: ServedModel) -> Reply:
    return tf_serving.write(request, answer)


def _invoked_write(request: Asked, answer: Answer, _model: ServedModel) -> Reply:
    return invocations.write(request, answer)


async def _only_post(_http: Request) -> Response:
    raise HTTPException(405, headers={"Allow": "POST"})


async def _only_predict(http: Request) -> Response:
    verb = http.path_params["verb"][:20]
    raise HTTPException(404, f"no :{verb}; the server answers :predict")


async def _live(_http: Request) -> Response:
    return json_response({"live": True})


async def _server_metadata(_http: Request) -> Response:
    return json_response(open_inference.server_metadata(_version()))


def _version() -> str:
    from importlib.metadata import version

    return version("meshwright")
