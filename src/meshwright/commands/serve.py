"""``meshwright serve``: a model behind HTTP, from its checkpoint, on any mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .beside import BesideText
from .config import config_option
from .group import WORDS, Command, argument, option, traceback_option
from .options import layout_option, mesh_option, strategy_option
from .texts import BuildText, BytesText, SizesText

if TYPE_CHECKING:
    from ..layouts.layout import Layout

_PLATFORMS = ("bentoml", "compose", "knative", "kserve", "kubeflow", "mlflow", "ray", "sagemaker")
_FORMATS = ("stablehlo", "savedmodel", "onnx")
_OF_THE_PLATFORM = (
    "warm_up",
    "host",
    "port",
    "grpc_port",
    "fd",
    "platform",
    "folder",
    "image",
    "api_keys",
)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SECONDS = click.FloatRange(0, min_open=True)


@click.command(cls=Command, short_help="Serve a model over HTTP.")
@argument("source", type=click.Path(exists=True, path_type=Path), metavar="RUN")
@option(
    "--model",
    "build",
    type=BuildText(),
    metavar="MODULE:BUILD",
    help="The function that builds the model, as for `meshwright dry-run`; not for .keras files.",
)
@mesh_option('The mesh to serve on: "model=4".  [default: one device]')
@layout_option
@option(
    "--plan",
    type=_FILE,
    metavar="FILE",
    help="Mesh, layouts, batches and precision of a plan: meshwright plan --save.",
)
@option(
    "--pipeline",
    metavar="AXIS",
    help="Cut the model into stages over this axis of the mesh.",
)
@strategy_option(layouts="--layout", pipeline="--pipeline")
@option("--name", help="Name of the model in URLs.  [default: that of the folder or file]")
@option(
    "--model-version",
    "version",
    help="Version of the model, as answers name it.  [default: the step of the checkpoint]",
)
@option(
    "--beside",
    multiple=True,
    type=BesideText(),
    metavar="ENTRY",
    help='One more model or version: "run=runs/new,version=2,share=0.1,compare=0.5"; other keys '
    "are options of the model. In a file: tables [[serve.beside]].",
)
@option("--host", default="127.0.0.1", help="Address to listen on.")
@option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    envvar="PORT",
    help="Port to listen on; 0 for any that is free. PORT in the environment sets it, too.",
)
@option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    help="Port for the Open Inference protocol over gRPC, too; 0 for any that is free.",
)
@option("--fd", type=click.IntRange(0), help="Listen on this open socket instead.")
@option("--max-rows", type=click.IntRange(1), help="Rows of the largest batch.  [default: 32]")
@option(
    "--buckets",
    type=SizesText(),
    metavar="ROWS,...",
    help="Rows of the batches that are compiled: 1,8,32.  [default: 1,2,4,8,12,16,24,32]",
)
@option(
    "--lengths", type=SizesText(), metavar="SIZES", help="Sizes that ragged dims are padded to."
)
@option("--pad-value", type=float, help="What ragged dims are padded with.  [default: 0]")
@option("--wait", type=click.FloatRange(0), help="Seconds that a batch waits for more rows.")
@option(
    "--in-flight",
    type=click.IntRange(1),
    help="Batches under way at once.  [default: 1, or one more than stages]",
)
@option("--queue-rows", type=click.IntRange(1), help="Rows that may wait; more are refused (429).")
@option("--timeout", type=_SECONDS, default=60.0, help="Time limit of a request, in seconds.")
@option("--finite", is_flag=True, help="Refuse answers with NaN or infinity (500).")
@option(
    "--precision",
    type=click.Choice(["bfloat16", "float16", "int8"]),
    help="Convert the weights.",
)
@option(
    "--sample",
    type=_FILE,
    metavar="FILE",
    help="Inputs by name (.npz): also say how far the answers with --precision are from those "
    "without.",
)
@option(
    "--reload",
    "--follow",
    "reload",
    type=_SECONDS,
    metavar="SECONDS",
    help="Look for newer checkpoints this often; for deltas, where RUN is a folder of exports.",
)
@option(
    "--max-body",
    type=BytesText(),
    default="64MiB",
    metavar="BYTES",
    help="Largest body of a request.",
)
@option("--api-keys", type=_FILE, metavar="FILE", help="Require an API key listed in this file.")
@option("--tls-certificate", type=_FILE, metavar="FILE", help="Serve HTTPS with this PEM file.")
@option("--tls-key", type=_FILE, metavar="FILE", help="The private key of the certificate.")
@option(
    "--drain",
    type=click.FloatRange(0),
    default=0.0,
    help="Seconds to keep answering after SIGTERM, so that load balancers notice.",
)
@option("--telemetry", is_flag=True, help="Send traces by OpenTelemetry, as OTEL_* variables say.")
@option(
    "--write",
    "platform",
    type=click.Choice([*_PLATFORMS, *_FORMATS]),
    help="Write the files for a platform, or export the model, and exit.",
)
@option(
    "--to",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    help="The folder for --write.",
)
@option(
    "--warm-up",
    is_flag=True,
    help="Load, compile into the cache on disk, and exit; for building container images.",
)
@option("--image", default="", help="The container image for --write.  [default: NAME:latest]")
@config_option
@traceback_option
@click.pass_context
def serve(
    ctx: click.Context,
    layouts: tuple[tuple[tuple[str, Layout], ...], ...],
    options: tuple[tuple[str, Any], ...],
    platform: str | None,
    folder: Path,
    image: str,
    **how: Any,
) -> None:
    """Serve a trained model over HTTP until SIGTERM, which drains it.

    RUN is the folder of a run (the newest checkpoint is taken), one checkpoint, a .keras file, or a
    folder that a mw.DeltaExporter writes. BUILD returns the model, or what it returns for
    `meshwright dry-run`: of a Program (program, batch), for its batch says what the inputs are. Of
    a batch (x, y) that is x, of any other all of it.
    Clients may speak the Open Inference protocol V2, TensorFlow Serving's REST, or SageMaker's and
    MLflow's /invocations. The page at / shows load, latency, layouts and how to call the model.

    \b
    meshwright serve runs/mnist --model train:build --mesh model=4
    meshwright serve model.keras --port 9000 --buckets 1,8,32
    meshwright serve runs/mnist --model train:build --host 0.0.0.0 --api-keys keys.txt
    meshwright serve exports/shop --model train:build --follow 5
    meshwright serve runs/mnist --model train:build --write kserve
    meshwright serve runs/mnist --model train:build --beside run=runs/new,version=2,share=0.1

    Only this machine can reach the server unless --host says otherwise.
    """
    from .serving import ServeOptions, run, write

    served = ServeOptions(layouts=dict(chain(*layouts)), options=dict(options), **how)
    if platform is None:
        run(served)
        return
    for path in write(served, platform, folder, image, _passed_on(ctx)):
        click.echo(path)


def options_of(words: Sequence[str]) -> Mapping[str, Any]:
    """The parameters of the command for these words, as a program of a platform needs them."""
    with serve.make_context("serve", list(words)) as ctx:
        left_out = ("platform", "folder", "image")
        params = {key: value for key, value in ctx.params.items() if key not in left_out}
    layouts, options = params.pop("layouts"), params.pop("options")
    return {**params, "layouts": dict(chain(*layouts)), "options": dict(options)}


def _passed_on(ctx: click.Context) -> tuple[str, ...]:
    """The words of the command line, but for those that the platform itself says."""
    by_name = {
        word: param.is_flag if isinstance(param, click.Option) else False
        for param in ctx.command.params
        if param.name in _OF_THE_PLATFORM
        for word in param.opts
    }
    words, result = iter(ctx.meta[WORDS]), []
    for word in words:
        name, joined, _ = word.partition("=")
        if name not in by_name:
            result.append(word)
        elif not joined and not by_name[name]:
            next(words)
    return tuple(result)
