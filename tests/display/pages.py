"""Reports as pages, and what a reader sees of them."""

from __future__ import annotations

import functools
from xml.etree import ElementTree

import keras
import models
from keras import layers
from models import shapes

import meshwright as mw
from meshwright.frontends.dry_runs import dry_run
from meshwright.frontends.keras.abstract import abstract
from meshwright.planning import Target
from meshwright.planning.dry_run import DryRun, Memory
from meshwright.targets.hardware import Hardware, Link

MESH = mw.Mesh({"batch": 4, "model": 2})
GUESS = Hardware(
    "guess",
    (("float32", 1e9),),
    memory_bytes=1 << 30,
    memory_bandwidth_bytes_per_s=1e9,
    links=(Link("shared", "shared", 1e9),),
    sources=(("memory_bytes", "a <guess> & no more"),),
)
EVIL = "<script>alert('1')</script>&amp;"


@functools.cache
def report() -> DryRun:
    """Of a model with an unexpected gather and a layer of an evil name."""
    with abstract():
        model = keras.Sequential(
            [
                keras.Input([16]),
                layers.Dense(32, activation="relu", use_bias=False, name="w"),
                layers.Dense(16, use_bias=False, name="v"),
                layers.Dense(16, name="<script>"),
            ],
            name="<b>net",
        )
        model.compile("adam", "mse")
    strategy = mw.Sharded(MESH, {"w/kernel": [None, "model"]})
    batch = shapes(64, 16), shapes(64, 16)
    return dry_run(model, batch, strategy=strategy, target="cpu:8", hardware=GUESS)


@functools.cache
def looped() -> DryRun:
    """Of a step with a loop over layers."""

    placement = mw.Placement.of(mw.Mesh({"batch": 8}), zero=3)
    return dry_run(
        models.looped(6, 64), shapes(32, 64), strategy=placement, target="cpu:8", hardware=GUESS
    )


def bare(**more) -> DryRun:
    """A report without a compilation."""
    memory = Memory(6, 12, 1, 1, 6, **more)
    return DryRun("net", Target.of("v5e:2x4"), (("batch", 8),), memory)


def page(result: DryRun) -> ElementTree.Element:
    """The page as a tree; raises for one that is not well formed."""
    return ElementTree.fromstring(result.to_html())


def text(element: ElementTree.Element) -> str:
    """What a reader sees: texts without scripts, styles, and the words of pictures."""
    if element.tag in ("script", "style", "head"):
        return ""
    own = element.text or ""
    return own + "".join(f"{text(child)}{child.tail or ''}" for child in element)


def rows_of(tree: ElementTree.Element, name: str) -> list[list[str]]:
    (box,) = (element for element in tree.iter("div") if element.get("id") == name)
    (body,) = box.iter("tbody")
    return [[text(cell).strip() for cell in row] for row in body]
