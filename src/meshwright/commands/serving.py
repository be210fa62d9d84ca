"""What ``meshwright serve`` does: a server from the options of the command line."""

from __future__ import annotations

import re
import signal
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..equivalence.cases import Case, axes_named
from ..errors import CheckpointError, ServingError
from ..extras import require
from ..launch.join import join
from ..layouts.mesh import Mesh
from ..together import Faults
from ..topology import make_cpu_devices
from .beside import models_beside

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..planning.search.plan import Plan
    from ..serving.http.run import Listening


@dataclass(frozen=True)
class ServeOptions:
    """The options of ``meshwright serve``."""

    source: Path
    build: str | None = None
    mesh: Mesh | None = None
    layouts: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Path | None = None
    pipeline: str | None = None
    name: str | None = None
    version: str | None = None
    beside: tuple[Mapping[str, Any], ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    fd: int | None = None
    max_rows: int | None = None
    buckets: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    pad_value: float | None = None
    wait: float | None = None
    in_flight: int | None = None
    queue_rows: int | None = None
    timeout: float = 60.0
    finite: bool = False
    precision: str | None = None
    sample: Path | None = None
    reload: float | None = None
    max_body: int = 64 << 20
    api_keys: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    drain: float = 0.0
    telemetry: bool = False
    warm_up: bool = False

    @property
    def model_name(self) -> str:
        """The name in URLs: that of the run's folder or of the file."""
        if self.name:
            return self.name
        path = self.source.resolve()
        return path.parent.name if path.stem.isdigit() else path.stem


def run(options: ServeOptions) -> None:
    """Serve until SIGTERM. What can be wrong with the options is found before JAX starts.

    In a group of processes rank 0 takes requests, and the others compute with it. A server that
    only warms up loads and ends.
    """
    _require()
    member = join()
    if member is not None and member.rank > 0:
        _follow(options)
        return
    if options.warm_up:
        with server_for(options) as server:
            print(f"compiled: {server!r}")
        return
    from ..serving.http.run import run as run_app

    run_app(lambda: app_for(options), _listening(options))


def _listening(options: ServeOptions) -> Listening:
    from ..serving.http.run import Listening

    return Listening(
        options.host,
        options.port,
        options.fd,
        options.tls_certificate,
        options.tls_key,
        options.drain,
        options.timeout,
    )


def _follow(options: ServeOptions) -> None:
    """Compute with rank 0 until it ends; a SIGTERM to all of the group is for rank 0 to drain."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = server_for(options)
    server.load()
    server.work()


def app_for(options: ServeOptions) -> Starlette:
    """The app of these options; it starts the model when its lifespan does."""
    _require()
    from ..serving.http.app import serving_app
    from ..serving.http.limits import Limits

    _check(options, keys=True)
    keys = _keys(options)
    limits = Limits(
        body_bytes=options.max_body,
        text_bytes=min(options.max_body, Limits.text_bytes),
        pending_bytes=max(Limits.pending_bytes, 2 * options.max_body),
        request_s=options.timeout,
    )
    if options.grpc_port is not None:
        for module in ("grpc", "tritonclient.grpc"):
            require(module, ServingError, "gRPC takes tritonclient and grpcio", "grpc")
    app = serving_app(server_for(options), limits=limits, keys=keys)
    if options.grpc_port is not None:
        from ..serving.http.rpc import with_rpc

        listening = replace(_listening(options), port=options.grpc_port, fd=None)
        with_rpc(app, listening, limits=limits, keys=keys)
    if options.telemetry:
        from ..serving.http.telemetry import traced

        traced(app)
    return app


def write(
    options: ServeOptions, platform: str, folder: Path, image: str, words: Sequence[str]
) -> tuple[Path, ...]:
    """Write the files of a platform, or the model in a format that needs no Meshwright."""
    from ..serving.exporting import FORMATS, export

    if platform in FORMATS:
        server = server_for(options)
        model: Any = server.model(server.names()[0])
        return export(model, folder, platform)
    from importlib.metadata import version

    from ..serving.platforms import Deployment, memory_for, write_files

    name = options.name or re.sub(r"[^a-z0-9]+", "-", options.model_name.lower()).strip("-")
    deployment = Deployment(
        name,
        tuple(words),
        version("meshwright"),
        image,
        devices=_mesh_size(options),
        memory_gib=memory_for(_weight_bytes(options.source)),
    )
    return write_files(platform, deployment, folder)


def _weight_bytes(source: Path) -> int:
    """Bytes of parameters and state; 0 where there is no checkpoint yet."""
    if source.is_file():
        return source.stat().st_size
    from ..checkpoint import read_checkpoint

    try:
        info = read_checkpoint(source)
    except CheckpointError:
        return 0
    weights = tuple(array for array in info.arrays if array.part in ("params", "state"))
    return replace(info, arrays=weights).nbytes


def _mesh_size(options: ServeOptions) -> int:
    mesh = _mesh_of(options)
    return mesh.size if mesh else 1


def _mesh_of(options: ServeOptions) -> Mesh | None:
    plan = _plan(options)
    return options.mesh if plan is None else plan.mesh


def _require() -> None:
    require("uvicorn", ServingError, "serving takes Starlette and uvicorn", "serve")


def server_for(options: ServeOptions) -> Any:
    """The server of the model, and of those beside it, on meshes of their own."""
    from ..serving.server import Server

    _check(options)
    beside = models_beside(options)
    _make_devices([_mesh_of(own) for own in (options, *(one.options for one in beside))])
    server = Server()
    server.add(**_model(options))
    for one in beside:
        server.add(**_model(one.options), share=one.share, compare=one.compare)
    return server


def _check(options: ServeOptions, *, keys: bool = False) -> None:
    """Raise for what can be known to be wrong before devices are made, all of it at once."""
    faults, models = Faults(), [options]
    with faults:
        models += [one.options for one in models_beside(options)]
    for own in models:
        for check in (_check_source, _sample, _plan, _check_pipeline):
            with faults:
                check(own)
    if keys:
        with faults:
            _keys(options)
    faults.refuse()


def _check_source(options: ServeOptions) -> None:
    """Raise :class:`ServingError` unless a model comes from somewhere."""
    source = options.source
    if source.suffix == ".keras":
        if options.build is not None:
            raise ServingError(f"{source} holds its model: leave --model out.")
    elif source.suffix == ".json":
        raise ServingError(
            f"{source} is a plan, not a run: meshwright serve RUN --model train:build "
            f"--plan {source}."
        )
    elif options.build is None:
        raise ServingError(
            f"{source} holds weights, not the model: name the function that builds it, "
            "--model train:build."
        )


def _check_pipeline(options: ServeOptions) -> None:
    """Raise :class:`ServingError` unless the mesh has the axis of the stages."""
    axis = options.pipeline
    if axis is not None and (options.mesh is None or axis not in options.mesh):
        size = "no mesh was given" if options.mesh is None else f"the mesh is {options.mesh}"
        raise ServingError(f"--pipeline {axis}: {size}. Add the axis: --mesh {axis}=2.")


def _keys(options: ServeOptions) -> Sequence[str]:
    from ..serving.http.keys import read_keys

    return read_keys(options.api_keys) if options.api_keys else ()


def _model(options: ServeOptions) -> dict[str, Any]:
    """One model, as :meth:`mw.Server.add` takes it."""
    plan = _plan(options)
    how = {"name": options.model_name, "version": options.version, **_engine_options(options)}
    if options.sample is not None:
        how["sample"] = _sample(options)
    if options.source.suffix == ".keras":
        case = Case(None, None, options.layouts, options.options)
        return {"model": options.source, "strategy": plan or _strategy(options, case), **how}
    from .planning import built_case

    assert options.build is not None
    case = built_case(options.build, options.layouts, options.options, needs_batch=False)
    return {
        "build": lambda: case.model if case.batch is None else (case.model, case.batch),
        "checkpoint": options.source,
        "strategy": plan or _strategy(options, case),
        **how,
    }


def _sample(options: ServeOptions) -> Mapping[str, Any]:
    """The inputs of ``--sample``, by name."""
    import numpy as np

    if options.sample is None:
        return {}
    if options.precision is None:
        raise ServingError("--sample compares answers with and without --precision: name one.")
    try:
        with np.load(options.sample, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, AttributeError, zipfile.BadZipFile) as error:
        raise ServingError(
            f"{options.sample} is not a file of arrays by name: {error}. Write it by numpy.savez."
        ) from error


def _plan(options: ServeOptions) -> Plan | None:
    """The plan that is served by; it decides what these options say otherwise."""
    if options.plan is None:
        return None
    own = {
        "--mesh": options.mesh,
        "--layout": options.layouts,
        "--option": options.options,
        "--pipeline": options.pipeline,
    }
    if both := [name for name, value in own.items() if value]:
        raise ServingError(
            f"--plan {options.plan} has mesh and layouts of its own: leave {', '.join(both)} out."
        )
    from ..planning.search.plan import Plan

    return Plan.load(options.plan)


def _make_devices(meshes: Sequence[Mesh | None]) -> None:
    """Those of the largest mesh, where CPUs serve; a group of processes has its own.

    Raises :class:`ServingError` for a mesh that leaves out devices of a group.
    """
    member = join()
    sizes = [mesh.size if mesh else 1 for mesh in meshes]
    if member is None:
        make_cpu_devices(max(sizes))
        return
    import jax

    size = min(sizes)
    if size != len(jax.devices()):
        raise ServingError(
            f"the mesh has {size} device(s), and the {member.processes} processes of the group "
            f"have {len(jax.devices())}. Name a mesh of all of them: --mesh."
        )


def _strategy(options: ServeOptions, case: Case) -> Any:
    """The strategy of the case, by stages where that is asked for."""
    from .planning import by_stages

    if (axis := options.pipeline) is not None:
        case = by_stages(case, axis, options.mesh)
    return strategy_of(case, options.mesh)


def strategy_of(case: Case, mesh: Mesh | None) -> Any:
    """The layouts of the model on a mesh of the first devices.

    Rows are whole where it has no axis ``batch``. Without a mesh they are those of one device,
    whatever axes they name.
    """
    import jax

    from ..layouts.mesh import create_mesh
    from .planning import for_serving, strategy_on

    axes = dict(mesh.axes) if mesh else dict.fromkeys(axes_named(case), 1)
    axes = axes or {"batch": 1}
    mesh = create_mesh(axes, jax.devices()[: Mesh(axes).size])
    return strategy_on(for_serving(case, mesh), mesh)


def _engine_options(options: ServeOptions) -> dict[str, Any]:
    """The options of the engine, without those that were not given."""
    values = {
        "max_rows": options.max_rows or (options.buckets[-1] if options.buckets else None),
        "buckets": options.buckets,
        "lengths": options.lengths,
        "wait_s": options.wait,
        "pad_value": options.pad_value,
        "in_flight": options.in_flight,
        "queue_rows": options.queue_rows,
        "finite": options.finite or None,
        "precision": options.precision,
        "follow_s": options.reload,
    }
    return {name: value for name, value in values.items() if value is not None}
