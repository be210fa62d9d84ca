"""``meshwright check``: does a model train under a mesh as it does on one device?"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from .config import config_option
from .group import Command, option, traceback_option
from .options import build_argument, layout_option, strategy_option
from .texts import MeshText

if TYPE_CHECKING:
    from ..equivalence.judging import Equivalence
    from ..layouts.layout import Layout
    from ..layouts.mesh import Mesh

_TAKEN = ("steps", "seed", "rtol", "double")


@click.command(cls=Command, short_help="Compare training on meshes with one device.")
@build_argument
@option(
    "--mesh",
    "meshes",
    type=MeshText(),
    required=True,
    multiple=True,
    metavar="MESH",
    help='A mesh to compare with one device: "batch=4,model=2". Repeat for more.',
)
@layout_option
@option("--steps", type=click.IntRange(1), default=5, help="Number of training steps.")
@option("--seed", type=int, default=0, help="Seed of initial weights and dropout.")
@option(
    "--rtol",
    type=click.FloatRange(0),
    help="Relative tolerance.  [default: by the coarsest float of the step; 1e-5 for float32]",
)
@option("--double", is_flag=True, help="Compute in float64, where rounding is negligible.")
@strategy_option(**{"layouts": "--layout"}, **{name: f"--{name}" for name in _TAKEN})
@option("--all", "show_all", is_flag=True, help="Show every variable, not only the worst twelve.")
@config_option
@traceback_option
def check(
    build: str,
    meshes: tuple[Mesh, ...],
    layouts: tuple[tuple[tuple[str, Layout], ...], ...],
    options: tuple[tuple[str, Any], ...],
    show_all: bool,
    **how: Any,
) -> None:
    """Train a model on one device and on each mesh, and report where they differ.

    BUILD is a function without arguments. It returns (model, batch) or (model, batch, layouts),
    where the model is a compiled Keras model or a Program. The devices are virtual CPU devices.

    \b
    meshwright check train:build --mesh batch=8 --mesh batch=4,model=2
    meshwright check train.py:build --mesh batch=8 --option zero=3 --double

    Exits with status 0 if every mesh trains as one device does, and with 1 if one does not.
    """
    from ..display.text.columns import print_text
    from ..display.text.equivalence import equivalence_text

    result = checked(build, meshes, dict(chain(*layouts)), dict(options), **how)
    print_text(equivalence_text(result, None) if show_all else equivalence_text(result))
    raise SystemExit(0 if result.equal else 1)


def checked(
    build: str,
    meshes: Sequence[Mesh],
    layouts: Mapping[str, Layout],
    options: Mapping[str, Any],
    double: bool,
    **how: Any,
) -> Equivalence:
    """How the model trains under every mesh, beside one device, on virtual devices made for it."""
    from .. import _compat
    from ..equivalence.check import check as compare
    from ..equivalence.finding import find_build
    from ..topology import virtual_devices

    def make_devices() -> None:
        if not _compat.jax_is_running():
            virtual_devices(max(mesh.size for mesh in meshes))

    make_devices()
    with _compat.double_precision() if double else contextlib.nullcontext():
        function = find_build(build)  # its module may make arrays
        make_devices()  # the module may have asked for fewer
        abstract = [mesh.abstract() for mesh in meshes]
        return compare(function, abstract, layouts, double=double, **how, **options)
