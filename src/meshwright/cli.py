"""The program ``meshwright``: ``demo``, ``show``, ``check``, ``plan``, ``launch`` and ``doctor``.

Whatever is heavy is imported inside the command that needs it, so that ``--help`` is instant.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import LayoutError, MeshwrightError

if TYPE_CHECKING:
    from .doctor import Diagnosis, Package
    from .drawing import Drawn
    from .mesh import Mesh

_ITEMSIZES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
_TRACEBACK_VARIABLE = "MESHWRIGHT_TRACEBACK"


class _Group(click.Group):
    """Prints the errors that Meshwright raises on purpose as one message, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MeshwrightError as error:
            if ctx.meta.get(_TRACEBACK_VARIABLE) or os.environ.get(_TRACEBACK_VARIABLE):
                click.echo(traceback.format_exc(), err=True, nl=False)
            else:
                told = [str(error), *getattr(error, "__notes__", ())]
                click.echo("Error: " + "\n".join(told), err=True)
            ctx.exit(2)


def _remember_traceback(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_TRACEBACK_VARIABLE] = True


_traceback_option = click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    callback=_remember_traceback,
    help=f"Show the traceback of an error ({_TRACEBACK_VARIABLE}=1 does so, too).",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="meshwright", prog_name="meshwright")
@_traceback_option
def main() -> None:
    """Meshwright: one model, any mesh."""


# show


@main.command()
@click.option("--mesh", "mesh_text", required=True, help='The mesh: "batch=4,model=2".')
@click.option("--dims", "dims_texts", multiple=True, help='The dims of a tensor: "784,128".')
@click.option(
    "--layout",
    "layout_texts",
    multiple=True,
    help='An entry per dim: "unsharded,model"; "batch+model" for several axes on one dim.',
)
@click.option(
    "--tensor",
    "tensor_texts",
    multiple=True,
    help='All in one, as often as wanted: "kernel:784x128:unsharded,model".',
)
@click.option(
    "--dtype",
    type=click.Choice(list(_ITEMSIZES)),
    default="float32",
    metavar="DTYPE",
    help="What the elements are: float32 (unless said otherwise), bfloat16, int8, ...",
)
@click.option("--title", default="", help="A title for the picture.")
@click.option(
    "--svg",
    "svg_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the picture to this file, too.",
)
@_traceback_option
def show(
    mesh_text: str,
    dims_texts: tuple[str, ...],
    layout_texts: tuple[str, ...],
    tensor_texts: tuple[str, ...],
    dtype: str,
    title: str,
    svg_path: Path | None,
) -> None:
    """Draw how tensors lie on a mesh, which need not be there.

    \b
    meshwright show --mesh batch=4,model=2 --dims 784,128 --layout unsharded,model
    meshwright show --mesh batch=4,model=2 --svg kernels.svg \\
        --tensor kernel:784x128:unsharded,model --tensor bias:128:model
    """
    from rich.console import Console

    from .drawing import Section, Sheet, draw_svg, draw_text
    from .mesh import Mesh

    mesh = Mesh.from_string(mesh_text)
    tensors = [*_paired(dims_texts, layout_texts), *map(_in_three, tensor_texts)]
    sheet = Sheet(title, (Section("", mesh, _all_drawn(tensors, mesh, _ITEMSIZES[dtype])),))
    Console().print(draw_text(sheet))
    if svg_path is not None:
        _write(svg_path, draw_svg(sheet))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(path), hint=error.strerror or str(error)) from error
    click.echo(f"wrote {path}")


def _paired(dims_texts: Sequence[str], layout_texts: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, dims and layout of each ``--layout``; one ``--dims`` may serve several layouts."""
    if len(dims_texts) == 1 and layout_texts:
        dims_texts = [dims_texts[0]] * len(layout_texts)
    if len(dims_texts) != len(layout_texts):
        raise click.UsageError(
            f"--dims and --layout belong together: {len(dims_texts)} of the one and "
            f"{len(layout_texts)} of the other are given."
        )
    count = len(layout_texts)
    names = ["tensor"] if count == 1 else [f"tensor {i + 1}" for i in range(count)]
    return list(zip(names, dims_texts, layout_texts, strict=True))


def _in_three(text: str) -> tuple[str, str, str]:
    parts = text.rsplit(":", 2)
    if len(parts) != 3:
        raise click.BadParameter(
            f"{text!r} is not name:dims:layout, such as kernel:784x128:unsharded,model.",
            param_hint="--tensor",
        )
    name, dims, layout = parts
    return name, dims, layout


def _all_drawn(
    tensors: Sequence[tuple[str, str, str]], mesh: Mesh, itemsize: int
) -> tuple[Drawn, ...]:
    """All the tensors, or one error that names all their faults."""
    drawn, faults = [], []
    for name, dims, layout in tensors:
        try:
            drawn.append(_drawn(name, dims, layout, mesh, itemsize))
        except LayoutError as error:
            faults.append(str(error))
    if faults:
        raise LayoutError("\n".join(faults))
    return tuple(drawn)


def _drawn(name: str, dims_text: str, layout_text: str, mesh: Mesh, itemsize: int) -> Drawn:
    from .drawing import Drawn
    from .layout import Layout

    sizes = [size.strip() for size in re.split("[,x×]", dims_text)] if dims_text.strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise click.BadParameter(
            f"{dims_text!r} is not a list of sizes, such as 784,128 or 784x128.",
            param_hint="--dims",
        )
    layout_text = layout_text.strip()
    layout = Layout.from_string(layout_text if layout_text[:1] == "[" else f"[{layout_text}]")
    return Drawn(name, tuple(int(size) for size in sizes), layout.on(mesh), itemsize)


# check


@main.command()
@click.argument("build", metavar="MODULE:BUILD")
@click.option(
    "--mesh", "mesh_texts", required=True, multiple=True, help='A mesh: "batch=4,model=2"; repeat.'
)
@click.option(
    "--rule",
    "rule_texts",
    multiple=True,
    help='A layout beside those of BUILD: "hidden.*kernel:unsharded,model"; repeat.',
)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="How many.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and dropout.")
@click.option("--rtol", type=float, help="Allowed of the largest gradient, or change.")
@click.option("--double", is_flag=True, help="In float64: no doubt is left about rounding.")
@click.option(
    "--option",
    "option_texts",
    multiple=True,
    help="A further argument of the strategy, in JSON: zero=3, batch=null, ...; repeat.",
)
@click.option("--all", "show_all", is_flag=True, help="Show every variable, not the worst twelve.")
@_traceback_option
def check(
    build: str,
    mesh_texts: tuple[str, ...],
    rule_texts: tuple[str, ...],
    steps: int,
    seed: int,
    rtol: float | None,
    double: bool,
    option_texts: tuple[str, ...],
    show_all: bool,
) -> None:
    """Train a model on one device and under each mesh, and tell where they differ.

    BUILD is a function without arguments that returns a compiled Keras model and a batch, or a
    Program and a batch, and layouts beside them if there are any. The devices are virtual ones.

    \b
    meshwright check train:build --mesh batch=8 --mesh batch=4,model=2
    meshwright check train.py:build --mesh batch=8 --option zero=3 --double

    Ends with status 0 if every mesh trains as one device does, else with 1.
    """
    from .equivalence.command import run

    equal = run(
        build,
        mesh_texts,
        [_rule(text) for text in rule_texts],
        dict(_option(text) for text in option_texts),
        None if show_all else 12,
        steps=steps,
        seed=seed,
        rtol=rtol,
        double=double,
    )
    raise SystemExit(0 if equal else 1)


def _rule(text: str, option: str = "--rule") -> tuple[str, str]:
    pattern, colon, axes = text.rpartition(":")
    if not (colon and pattern and axes):
        raise click.BadParameter(
            f"{text!r} is not pattern:layout, such as hidden.*kernel:unsharded,model.",
            param_hint=option,
        )
    return pattern, axes.strip("[] ")


def _option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not (sign and name.isidentifier()):
        raise click.BadParameter(
            f"{text!r} is not name=value, such as zero=3.", param_hint="--option"
        )
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value  # a bare word, such as an axis


# plan


@main.command()
@click.argument("build", metavar="MODULE:BUILD")
@click.option("--target", required=True, help='The machine: "v5p:2x2x2", "v5e:4x4", "cpu:8".')
@click.option("--mesh", "mesh_text", help='The mesh: "data=4,model=2"; else "batch" over all.')
@click.option(
    "--layout",
    "layout_texts",
    multiple=True,
    help='Layouts beside those of BUILD: "hidden.*kernel:unsharded,model"; repeat, or join by ";".',
)
@click.option("--zero", type=click.IntRange(0, 3), help="The level of ZeRO.")
@click.option("--batch-size", type=click.IntRange(1), help="Rows of all devices; else BUILD's.")
@click.option(
    "--option",
    "option_texts",
    multiple=True,
    help="A further argument of the strategy, in JSON: accumulate=4, remat=block, ...; repeat.",
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=3600.0, help="Seconds to compile."
)
@click.option("--no-cache", is_flag=True, help="Compile anew, and do not keep the answer.")
@click.option(
    "--no-compile", is_flag=True, help="Take the planner's model in place of the compiler."
)
@click.option("--html", metavar="FILE", help="Write the report as a page for a browser, too.")
@click.option("--measure", is_flag=True, help="Run the step here, too; for targets such as cpu:8.")
@click.option("--save", metavar="FILE", help="Write what was found to a JSON file, for --check.")
@click.option("--check", metavar="FILE", help="Fail if anything got worse than in such a file.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    help="The share by which bytes may grow under --check; else 0, and 0.01 for the compiler's.",
)
@_traceback_option
def plan(
    build: str,
    target: str,
    mesh_text: str | None,
    layout_texts: tuple[str, ...],
    zero: int | None,
    batch_size: int | None,
    option_texts: tuple[str, ...],
    timeout: float,
    no_cache: bool,
    no_compile: bool,
    html: str | None,
    measure: bool,
    save: str | None,
    check: str | None,
    tolerance: float | None,
) -> None:
    """Compile the training step of a model for machines that one does not have; tell what it costs.

    BUILD is a function without arguments that returns a compiled Keras model and a batch, or a
    Program and a batch, and layouts beside them if there are any. A Keras model is built as shapes
    only, so its size does not matter; nor do the values of the batch.

    \b
    meshwright plan train:build --target v5p:2x2x2 --mesh batch=4,model=2
    meshwright plan train.py:build --target cpu:8 --zero 3 --batch-size 1024 --measure
    meshwright plan train:build --target h100:8 --save plan.json
    meshwright plan train:build --target h100:8 --check plan.json

    Where no compiler for a GPU is installed, and with --no-compile, the figures are those of the
    planner's model alone, and the report says so.

    Ends with status 0 if the step fits, or if nobody knows, and with 1 if it does not, or if
    anything got worse than in the file of --check.
    """
    if no_cache:
        os.environ["MESHWRIGHT_CACHE"] = "off"
    from .plan_command import Asked, check_folders, checked, run, run_here
    from .planning.lock import Lock, lock_of

    check_folders(html, save)
    before = None if check is None else Lock.load(check)  # before minutes of compiling
    asked = Asked(
        build,
        target,
        mesh_text,
        [_rule(each, "--layout") for text in layout_texts for each in text.split(";")],
        zero,
        batch_size,
        dict(_option(text) for text in option_texts),
        compile=not no_compile,
    )
    here = run_here(asked, timeout, html) if measure else (run(asked, timeout, html), None)
    report, beside = here
    click.echo(str(report))
    if beside is not None:
        click.echo(f"\n{beside}")
    words, is_worse = ("", False) if before is None else checked(report, before, tolerance)
    if words:
        click.echo(f"\n{words}")
    if save is not None:
        lock_of(report).save(save)
    raise SystemExit(1 if is_worse or report.fits is False else 0)


# choose


@main.command()
@click.argument("build", metavar="MODULE:BUILD")
@click.option("--target", required=True, help='The machine: "v5p:2x2x2", "h100:8".')
@click.option("--mesh", "mesh_text", help='Keep to this mesh: "data=4,model=2".')
@click.option(
    "--objective",
    type=click.Choice(["time", "memory"]),
    default="time",
    help="The least time of a step, or the least bytes at the peak.",
)
@click.option(
    "--memory-gb", type=click.FloatRange(0, min_open=True), help="Take no more of a device, in GB."
)
@click.option("--batch-size", type=click.IntRange(1), help="Rows of all devices; else BUILD's.")
@click.option(
    "--verify",
    type=click.IntRange(0),
    default=0,
    help="Compile so many of the best, and rank them by their dry runs.",
)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=10.0, help="To search for."
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), default=3600.0, help="Seconds to compile."
)
@click.option("--html", metavar="FILE", help="Write the alternatives as a page for a browser, too.")
@click.option("--save", metavar="FILE", help="Write the plan to a JSON file, for mw.Plan.load.")
@_traceback_option
def choose(
    build: str,
    target: str,
    mesh_text: str | None,
    objective: str,
    memory_gb: float | None,
    batch_size: int | None,
    verify: int,
    seconds: float,
    timeout: float,
    html: str | None,
    save: str | None,
) -> None:
    """Choose mesh, layouts, ZeRO, micro-batches and recompute for a model on a machine; tell why.

    BUILD is what `meshwright plan` takes; layouts that it returns are not looked at.

    \b
    meshwright choose train:build --target h100:8
    meshwright choose train:build --target v5e:4x4 --memory-gb 14 --verify 3 --save plan.json
    """
    from .plan_command import check_folders
    from .plan_command import choose as chosen
    from .planning.files import write

    check_folders(html, save)
    found = chosen(
        build,
        target,
        mesh_text,
        batch_size,
        objective=objective,
        memory_limit=None if memory_gb is None else round(1e9 * memory_gb),
        verify=verify,
        limit_s=seconds,
        timeout_s=timeout,
    )
    click.echo(str(found))
    if html is not None:
        write(html, found.to_html(), "the page")
    if save is not None:
        found.save(save)


# launch


@main.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.option("--workers", type=int, default=2, show_default=True, help="Workers to start.")
@click.option("--ps", type=int, default=1, show_default=True, help="Parameter servers to start.")
@click.option("--evaluator", is_flag=True, help="Run the program as the evaluator, too.")
@click.option("--quiet", is_flag=True, help="Do not show what the tasks print.")
@click.option("--max-restarts", type=int, default=10, show_default=True, help="Per task, in a row.")
@click.option("--worker-devices", type=int, help="CPU devices to make in each worker.")
@click.argument("program", nargs=-1, required=True, metavar="PROGRAM [ARGUMENTS]...")
@_traceback_option
def launch(program: tuple[str, ...], quiet: bool, **numbers: Any) -> None:
    """Run a Python program as the chief of a cluster on this machine; its exit code is returned.

    The program joins by `mw.ParameterServer(mw.run_task())`. When it ends, all tasks end.

    \b
    meshwright launch --workers 2 --ps 2 train.py --epochs 3
    """
    from .launch.script import run_launched

    raise SystemExit(run_launched(program, logs=not quiet, **numbers))


# doctor


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@_traceback_option
def doctor(as_json: bool) -> None:
    """Tell what is installed, which devices there are, and what is missing.

    Ends with status 0 if Meshwright can be used here, else with 1.
    """
    from .doctor import examine

    diagnosis = examine()
    if as_json:
        click.echo(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        _print_diagnosis(diagnosis)
    raise SystemExit(0 if diagnosis.usable else 1)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    # Not with Rich, which may be among the packages that are missing.
    click.secho(
        f"meshwright {diagnosis.meshwright}, Python {diagnosis.python}, {diagnosis.system}, "
        f"{diagnosis.cores} cores",
        bold=True,
    )
    for title, required in (("required", True), ("optional", False)):
        click.echo(f"\n{title}")
        for package in diagnosis.packages:
            if package.required == required:
                _print_package(package)
    click.echo("\ndevices")
    for line in _device_lines(diagnosis):
        click.echo(f"  {line}")
    click.echo("\nsettings")
    for name, value in diagnosis.environment.items():
        click.echo(f"  {name:<20} {'not set' if value is None else value}")
    click.echo(f"\ndata\n  {diagnosis.data}\n")
    _print_verdict(diagnosis)


def _print_package(package: Package) -> None:
    version = package.version or "not installed"
    colour = {"ok": "green", "broken": "red"}.get(
        package.state, "red" if package.required else "yellow"
    )
    click.echo(f"  {package.name:<18} ", nl=False)
    click.secho(f"{version:<14}", fg=colour, nl=False)
    click.echo(f" {package.fault or package.purpose}")


def _device_lines(diagnosis: Diagnosis) -> list[str]:
    alike = Counter((d.platform, d.kind, d.memory_bytes) for d in diagnosis.devices)
    lines = [
        f"{count} {platform} ({kind}"
        + (f", {memory / 2**30:.1f} GiB each)" if memory else ", memory not told)")
        for (platform, kind, memory), count in alike.items()
    ]
    process = f"process {diagnosis.process_index} of {diagnosis.process_count}"
    return [*lines, process] if lines else ["none"]


def _print_verdict(diagnosis: Diagnosis) -> None:
    for note in diagnosis.notes:
        click.secho(f"note: {note}", fg="yellow")
    for fault in diagnosis.faults:
        click.secho(f"fault: {fault}", fg="red")
    if diagnosis.usable:
        click.secho("Everything that is required is here and works.", fg="green")
    if diagnosis.command:
        click.echo(f"To mend it:        {diagnosis.command}")
    if diagnosis.optional_command:
        click.echo(f"For what is optional: {diagnosis.optional_command}")


# demo


@main.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="MNIST as an .npz file; else Keras' cache, a download, or the digits shipped here.",
)
@click.option("--epochs", type=int, help="How often each run goes through the digits.")
@click.option("--runs", help='Which of the runs: "a,b,c".')
@click.option("--out", type=click.Path(path_type=Path), help="The folder for the picture.")
@click.option("--quick", is_flag=True, help="A few digits for one epoch, to see that all works.")
@_traceback_option
def demo(**options: Any) -> None:
    """Train on handwritten digits under three kinds of parallelism, changing only the layout."""
    from . import demo as demonstration

    demonstration.main(**{name: value for name, value in options.items() if value is not None})


if __name__ == "__main__":
    main()
