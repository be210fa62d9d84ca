"""``meshwright check``: does a model train under a mesh as it does on one device?"""

from __future__ import annotations

import click

from .group import traceback_option
from .options import build_argument
from .texts import option, rule


@click.command()
@build_argument
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
@traceback_option
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
    from ..equivalence.command import run

    equal = run(
        build,
        mesh_texts,
        [rule(text) for text in rule_texts],
        dict(option(text) for text in option_texts),
        None if show_all else 12,
        steps=steps,
        seed=seed,
        rtol=rtol,
        double=double,
    )
    raise SystemExit(0 if equal else 1)
