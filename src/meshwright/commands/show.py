"""``meshwright show``: tensors on a mesh, drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import LayoutError
from .group import Command, option, traceback_option
from .options import mesh_option
from .texts import NewFile

if TYPE_CHECKING:
    from ..display.drawing import Drawn
    from ..layouts.mesh import Mesh

_ITEMSIZES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


@click.command(cls=Command, short_help="Draw tensors on a mesh.")
@mesh_option('The mesh: "batch=4,model=2".', required=True)
@option(
    "--dims",
    "dims_texts",
    multiple=True,
    metavar="DIMS",
    help='The dims of a tensor: "784,128".',
)
@option(
    "--layout",
    "layout_texts",
    multiple=True,
    metavar="LAYOUT",
    help='One entry per dim: "unsharded,model"; "batch+model" for two axes on one dim.',
)
@option(
    "--tensor",
    "tensor_texts",
    multiple=True,
    metavar="NAME:DIMS:LAYOUT",
    help='Name, dims and layout together: "kernel:784x128:unsharded,model". Repeat for more.',
)
@option(
    "--dtype",
    type=click.Choice(list(_ITEMSIZES)),
    default="float32",
    metavar="DTYPE",
    help="Element type: bfloat16, int8, ...",
)
@option("--title", default="", help="Title of the picture.")
@option(
    "--svg",
    "svg_path",
    type=NewFile("the picture"),
    metavar="FILE",
    help="Also write the picture to this file.",
)
@traceback_option
def show(
    mesh: Mesh,
    dims_texts: tuple[str, ...],
    layout_texts: tuple[str, ...],
    tensor_texts: tuple[str, ...],
    dtype: str,
    title: str,
    svg_path: Path | None,
) -> None:
    """Draw how tensors are laid out on a mesh; its devices need not be present.

    \b
    meshwright show --mesh batch=4,model=2 --dims 784,128 --layout unsharded,model
    meshwright show --mesh batch=4,model=2 --svg kernels.svg \\
        --tensor kernel:784x128:unsharded,model --tensor bias:128:model
    """
    from rich.console import Console

    from ..display.drawing import Section, Sheet, draw_svg, draw_text
    from ..files import write

    tensors = [*_paired(dims_texts, layout_texts), *map(_in_three, tensor_texts)]
    sheet = Sheet(title, (Section("", mesh, _all_drawn(tensors, mesh, _ITEMSIZES[dtype])),))
    Console().print(draw_text(sheet))
    if svg_path is not None:
        write(svg_path, draw_svg(sheet), "the picture")
        click.echo(f"wrote {svg_path}")


def _paired(dims_texts: Sequence[str], layout_texts: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, dims and layout of each ``--layout``; one ``--dims`` may serve several layouts."""
    if len(dims_texts) == 1 and layout_texts:
        dims_texts = [dims_texts[0]] * len(layout_texts)
    if len(dims_texts) != len(layout_texts):
        raise click.UsageError(
            f"--dims and --layout come in pairs; received {len(dims_texts)} --dims and "
            f"{len(layout_texts)} --layout."
        )
    count = len(layout_texts)
    names = ["tensor"] if count == 1 else [f"tensor {i + 1}" for i in range(count)]
    return list(zip(names, dims_texts, layout_texts, strict=True))


def _in_three(text: str) -> tuple[str, str, str]:
    parts = text.rsplit(":", 2)
    if len(parts) != 3:
        raise click.BadParameter(
            "expected name:dims:layout, such as kernel:784x128:unsharded,model; received "
            f"{text!r}.",
            param_hint="--tensor",
        )
    name, dims, layout = parts
    return name, dims, layout


def _all_drawn(
    tensors: Sequence[tuple[str, str, str]], mesh: Mesh, itemsize: int
) -> tuple[Drawn, ...]:
    """All the tensors, or one error that names all their faults."""
    sheets, faults = [], []
    for name, dims, layout in tensors:
        try:
            sheets.append(_sheet(name, dims, layout, mesh, itemsize))
        except LayoutError as error:
            faults.append(str(error))
    if faults:
        raise LayoutError("\n".join(faults))
    return tuple(sheets)


def _sheet(name: str, dims_text: str, layout_text: str, mesh: Mesh, itemsize: int) -> Drawn:
    from ..display.drawing import Drawn
    from ..layouts.layout import Layout

    sizes = [size.strip() for size in re.split("[,x×]", dims_text)] if dims_text.strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise click.BadParameter(
            f"expected sizes, such as 784,128 or 784x128; received {dims_text!r}.",
            param_hint="--dims",
        )
    layout_text = layout_text.strip()
    layout = Layout.from_string(layout_text if layout_text[:1] == "[" else f"[{layout_text}]")
    return Drawn(name, tuple(int(size) for size in sizes), layout.on(mesh), itemsize)
