"""Sheets of many kinds of layout to draw."""

from __future__ import annotations

import pytest

from meshwright import Layout, Mesh
from meshwright.display.drawing import Drawn, Section, Sheet

GRID = {"batch": 4, "model": 2}
SOLID = {"batch": 2, "rows": 2, "cols": 2}
LARGE = {"batch": 64, "model": 8}


def drawn(name, dims, specs, mesh=None, **more):
    return Drawn(name, dims, Layout(specs, mesh), **more)


SHEETS = {
    "three runs": Sheet(
        "How the tensors of each run lie",
        (
            Section(
                "(a) data parallel",
                Mesh({"batch": 8}),
                (
                    drawn("images", (128, 784), ["batch", None], dim_names=("N", "pixels")),
                    drawn("dense/kernel", (784, 128), [None, None]),
                    drawn("dense/bias", (128,), [None]),
                ),
                note="97.4 % on the test digits",
            ),
            Section(
                "(b) data and model parallel",
                Mesh(GRID),
                (
                    drawn("images", (128, 784), ["batch", None]),
                    drawn("dense/kernel", (784, 128), [None, "model"]),
                    drawn("dense/bias", (128,), ["model"]),
                    drawn("logits/kernel", (128, 10), ["model", None]),
                    drawn("loss", (), []),
                ),
            ),
            Section(
                "(c) images split over height and width",
                Mesh(SOLID),
                (
                    drawn(
                        "images",
                        (128, 28, 28, 1),
                        ["batch", "rows", "cols", None],
                        dim_names=("N", "H", "W", "C"),
                    ),
                    drawn("conv/kernel", (3, 3, 1, 16), [None] * 4),
                    drawn("all", (64,), [("cols", "batch", "rows")]),
                ),
            ),
        ),
        note="One model, three meshes.",
    ),
    "large": Sheet(
        "",
        (
            Section(
                "",
                Mesh(LARGE),
                (
                    drawn("tokens", (512, 2048), ["batch", None]),
                    drawn("blocks/0/attention/query/kernel", (8192, 8192), ["batch", "model"]),
                    drawn("bias", (8192,), ["model"]),
                ),
            ),
            Section(
                "planes",
                Mesh({"x": 8, "y": 8, "z": 8}),
                (
                    drawn("cube", (64, 64, 64), ["x", "y", "z"]),
                    drawn("flat", (512,), [("x", "y", "z")]),
                ),
            ),
            Section("line", Mesh({"x": 512}), (drawn("rows", (1024, 64), ["x", None]),)),
        ),
    ),
    "long names": Sheet(
        "A title that is a good deal longer than the picture is wide, so that it is broken",
        (
            Section(
                "a section whose title does not fit beside its note",
                Mesh({"a_very_long_axis_name": 4, "another_very_long_one": 2, "and_a_third": 4}),
                (
                    drawn(
                        "encoder/block_12/attention/query/kernel_of_unusual_name",
                        (1 << 20, 1 << 22),
                        [("a_very_long_axis_name", "another_very_long_one"), "and_a_third"],
                    ),
                    drawn(
                        "x",
                        (1 << 20, 1 << 20, 1 << 22, 3),
                        ["a_very_long_axis_name", "another_very_long_one", "and_a_third", None],
                        dim_names=("sequence_position", "hidden_units", "words", "channel"),
                    ),
                ),
                note="and a note that is long enough to need a line of its own in any case",
            ),
        ),
    ),
    "one device": Sheet("", (Section("", Mesh({"x": 1}), (drawn("w", (3, 3), ["x", None]),)),)),
    "a mesh alone": Sheet("Only a mesh", (Section("", Mesh(GRID)),)),
    "more devices than cells": Sheet(
        "", (Section("", Mesh({"x": 128, "y": 128}), (drawn("w", (128, 128), ["x", "y"]),)),)
    ),
    "four axes": Sheet(
        "",
        (
            Section(
                "",
                Mesh({"a": 2, "b": 3, "c": 4, "d": 2}),
                (drawn("x", (4, 6, 8, 4), ["a", "b", "c", "d"]),),
            ),
        ),
    ),
}
every_sheet = pytest.mark.parametrize("sheet", SHEETS.values(), ids=SHEETS)
