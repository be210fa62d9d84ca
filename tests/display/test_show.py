"""Pictures of layouts: what they show is what JAX does, and they can be read."""

from __future__ import annotations

import io
import itertools
import re
from typing import NamedTuple
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from generated import abstract_meshes, bound_meshes, layouts
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import meshwright as mw
from meshwright import MATCH, UNSHARDED, Layout, LayoutError, Mesh
from meshwright.display.drawing import Drawn, Section, Sheet, draw_svg, draw_text
from meshwright.display.drawing.canvas import text_width
from meshwright.display.drawing.palette import luminance, paint
from meshwright.display.drawing.tiling import Tiling
from meshwright.testing import run_in_fresh_process

SVG = "{http://www.w3.org/2000/svg}"
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


# The tiling: the oracle is JAX


@given(layout=layouts(bound_meshes(), unsplit=(UNSHARDED,)), data=st.data())
def test_every_device_holds_the_piece_that_jax_puts_there(layout, data):
    dims = tuple(
        layout.num_shards(dim) * data.draw(st.integers(1, 3)) for dim in range(layout.rank)
    )
    tiling = Tiling.of(Drawn("x", dims, layout))
    slices = layout.sharding.devices_indices_map(dims)
    for position, device in enumerate(layout.bound_mesh().bound_devices()):
        expected = [
            (s.start or 0, n if s.stop is None else s.stop)
            for s, n in zip(slices[device], dims, strict=True)
        ]
        assert list(tiling.bounds(tiling.piece_of[position])) == expected


@given(layout=layouts(abstract_meshes(), unsplit=(UNSHARDED,)))
def test_every_device_holds_one_piece_and_every_piece_equally_many_copies(layout):
    dims = tuple(layout.num_shards(dim) for dim in range(layout.rank))
    tiling = Tiling.of(Drawn("x", dims, layout))
    held = sorted(p for piece in range(tiling.pieces) for p in tiling.holders(piece))
    assert held == list(range(tiling.mesh.size))
    assert {len(tiling.holders(piece)) for piece in range(tiling.pieces)} == {tiling.copies}
    firsts = [p for p in range(tiling.mesh.size) if tiling.is_first_copy(p)]
    assert len(firsts) == tiling.pieces


@given(layout=layouts(abstract_meshes(), unsplit=(UNSHARDED,)), data=st.data())
def test_a_picture_shows_every_dim_that_is_cut(layout, data):
    factors = data.draw(st.lists(st.integers(1, 3), min_size=layout.rank, max_size=layout.rank))
    dims = tuple(layout.num_shards(dim) * factor for dim, factor in enumerate(factors))
    tiling = Tiling.of(Drawn("x", dims, layout))
    hidden = tiling.directions.hidden(layout.rank)
    assert all(tiling.counts[dim] == 1 for dim in hidden)
    assert tiling.grid.filled == tiling.pieces


# The SVG


class Words(NamedTuple):
    """A text of a picture and the box that it takes."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other):
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 1 and down > 1


def parsed(svg):
    return ElementTree.fromstring(svg)


def words_of(root):
    return [_words(element) for element in root.iter(f"{SVG}text")]


def _words(element):
    x, y, size = (float(element.get(key)) for key in ("x", "y", "font-size"))
    mono = "monospace" in element.get("font-family", "")
    bold = element.get("font-weight") == "700"
    width = 0.85 * text_width(element.text, size, bold, mono)  # the estimate is a generous one
    start = {None: 0.0, "middle": width / 2, "end": width}[element.get("text-anchor")]
    if element.get("transform"):
        return Words(element.text, x - 0.7 * size, y + start - width, x + 0.2 * size, y + start)
    return Words(element.text, x - start, y - 0.7 * size, x - start + width, y + 0.2 * size)


@every_sheet
def test_no_text_overlaps_another_or_leaves_the_paper(sheet):
    root = parsed(draw_svg(sheet))
    width, height = float(root.get("width")), float(root.get("height"))
    words = words_of(root)
    assert words
    for each in words:
        assert each.left >= 0, each
        assert each.top >= 0, each
        assert each.right <= width, each
        assert each.bottom <= height, each
    clashes = [(a.text, b.text) for a, b in itertools.combinations(words, 2) if a.overlaps(b)]
    assert clashes == []


@pytest.mark.full_for("more devices than cells")
@every_sheet
def test_the_svg_is_self_contained(sheet):
    svg = draw_svg(sheet)
    root = parsed(svg)
    allowed = {"svg", "title", "desc", "defs", "pattern", "rect", "path", "text"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
    assert svg.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    referred = set(re.findall(r"url\(#(.*?)\)", svg))
    assert referred == {element.get("id") for element in root.iter(f"{SVG}pattern")}
    assert "nan" not in svg


def test_the_svg_stands_on_paper_of_its_own():
    root = parsed(draw_svg(SHEETS["three runs"]))
    paper = next(root.iter(f"{SVG}rect[@rx]"), None) or root.find(f"{SVG}rect")
    assert paper.get("fill") == "#FFFFFF"
    assert float(paper.get("width")) >= float(root.get("width")) - 1


def cells_of(svg):
    """Explanation -> paint, of every cell that explains itself."""
    paths = [
        path for path in parsed(svg).iter(f"{SVG}path") if path.find(f"{SVG}title") is not None
    ]
    return {path.find(f"{SVG}title").text: path.get("fill") for path in paths}


@pytest.mark.parametrize(
    ("axes", "dims", "specs"),
    [
        ({"batch": 8}, (16, 3), ["batch", None]),
        (GRID, (6, 4), [None, "model"]),
        (GRID, (8, 4), ["batch", "model"]),
        (GRID, (16,), [("model", "batch")]),
        (SOLID, (2, 4, 6, 3), ["batch", "rows", "cols", None]),
        (SOLID, (), []),
        ({"batch": 16}, (16,), ["batch"]),
    ],
)
def test_a_device_has_the_colour_of_the_piece_that_it_holds(axes, dims, specs):
    mesh = Mesh(axes)
    cells = cells_of(draw_svg(drawn("w", dims, specs, mesh)))
    pieces = {text: fill for text, fill in cells.items() if text.startswith("w[")}
    devices = {text: fill for text, fill in cells.items() if text.startswith("device ")}
    tiling = Tiling.of(drawn("w", dims, specs, mesh))
    assert len(pieces) == tiling.pieces
    assert len(set(pieces.values())) == tiling.pieces
    assert len(devices) == mesh.size
    solid = 0
    for text, fill in devices.items():
        colour = pieces[text.partition(": ")[2]]
        assert fill in (colour, f"url(#mw-{colour[1:]})")
        solid += fill == colour
    assert solid == tiling.pieces


def test_pieces_say_which_elements_they_hold_and_where():
    cells = cells_of(draw_svg(drawn("kernel", (784, 128), [None, "model"], Mesh(GRID))))
    assert "kernel[0:784, 0:64] on devices 0, 2, 4, 6" in cells
    assert "kernel[0:784, 64:128] on devices 1, 3, 5, 7" in cells


def test_the_numbers_are_those_of_the_devices():
    backwards = Mesh({"batch": 8}, jax.devices()[::-1])
    cells = cells_of(draw_svg(drawn("x", (8,), ["batch"], backwards)))
    assert "x[0:1] on device 7" in cells


def test_mesh_axes_sizes_and_bytes_are_written():
    kernel = drawn("kernel", (784, 128), [None, "model"], Mesh(GRID), itemsize=4)
    texts = {each.text for each in words_of(parsed(draw_svg(kernel, title="One kernel")))}
    assert {"One kernel", "batch = 4", "model = 2", "8 devices"} <= texts
    assert {"784", "128 = 2 × 64", "[unsharded, model]", "2 pieces × 4 copies"} <= texts
    assert {"784 × 128 · 392 KiB", "196 KiB per device"} <= texts
    assert {str(number) for number in range(8)} <= texts


def test_a_large_mesh_is_summarised():
    svg = draw_svg(SHEETS["large"])
    texts = [each.text for each in words_of(parsed(svg))]
    assert len(texts) < 120
    assert "0–511, row by row" in texts
    assert "64 pieces × 8 copies" in texts
    assert len(svg) < 500_000


def test_thousands_of_devices_are_drawn_with_several_in_a_cell():
    svg = draw_svg(SHEETS["more devices than cells"])
    assert "0–16383, 4 in a cell" in svg
    assert len(svg) < 500_000


def test_names_are_escaped():
    svg = draw_svg(drawn("<a & b>", (2,), [None], Mesh({"x": 2})), title='"<&>"')
    assert "<a & b>" in {each.text for each in words_of(parsed(svg))}


def test_a_long_path_stands_in_two_lines_and_names_its_block():
    texts = [each.text for each in words_of(parsed(draw_svg(SHEETS["large"])))]
    at = texts.index("query/kernel")
    assert texts[at - 1] == "blocks/0/attention/"
    mesh = Mesh({"data": 32, "model": 16})
    names = [f"transformer/block_{i}/attention/query/kernel" for i in range(3)]
    sheet = [drawn(name, (64, 64), [None, "model"], mesh) for name in names]
    texts = [each.text for each in words_of(parsed(draw_svg(sheet)))]
    assert all(f"…/block_{i}/attention/" in texts for i in range(3))


def test_the_picture_is_told_in_words():
    root = parsed(draw_svg(SHEETS["three runs"]))
    assert root.find(f"{SVG}title").text == "How the tensors of each run lie"
    assert "dense/bias, 128, [model]: 2 pieces × 4 copies." in root.find(f"{SVG}desc").text


def test_neighbouring_tensors_on_one_mesh_share_a_section():
    mesh, other = Mesh(GRID), Mesh({"batch": 8})
    tensors = [drawn("a", (4,), ["batch"], mesh), drawn("b", (4,), [None], mesh)]
    together, apart = draw_svg(tensors), draw_svg([*tensors, drawn("c", (8,), ["batch"], other)])
    assert together.count(">mesh</text>") == 1
    assert apart.count(">mesh</text>") == 2


# What cannot be drawn


def test_a_tensor_that_does_not_fit_is_an_error_with_its_name():
    mesh = Mesh(GRID)
    with pytest.raises(mw.DivisibilityError, match=r"dim 0 of kernel \(size 6\) does not divide"):
        drawn("kernel", (6, 4), ["batch", None], mesh)
    with pytest.raises(mw.DivisibilityError, match="dim 0 of kernel"):
        Section("", mesh, (drawn("kernel", (6, 4), ["batch", None]),))
    with pytest.raises(LayoutError, match=r"kernel has 1 dims \(6,\), but its layout .* has 2"):
        drawn("kernel", (6,), ["batch", None])
    with pytest.raises(LayoutError, match=r"x: layout .* contains MATCH"):
        drawn("x", (6,), [MATCH])
    with pytest.raises(LayoutError, match=r"2 dims \(6, 4\) and 1 dim_names"):
        drawn("kernel", (6, 4), [None, None], dim_names=("in",))


def test_an_unbound_layout_is_an_error():
    with pytest.raises(LayoutError, match="is unbound"):
        draw_svg(drawn("kernel", (6, 4), [None, "model"]))


def test_something_else_is_an_error():
    with pytest.raises(LayoutError, match="made of Drawn and Section values; received 'kernel'"):
        draw_svg(["kernel"])


# Colours

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
COLOUR_VISION = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def oklab(colour, vision):
    """Where a colour lies in Oklab (Ottosson 2020), seen with this colour vision."""
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(vision) @ linear, 0, 1)
    to_cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_cones) @ seen)


@pytest.mark.parametrize("vision", COLOUR_VISION.values(), ids=COLOUR_VISION)
def test_eight_pieces_are_told_apart_with_any_colour_vision(vision):
    places = [oklab(paint(piece, 8).fill, vision) for piece in range(8)]
    closest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2))
    assert closest > 0.08  # two colours are told apart side by side from about 0.02 on


def test_the_colours_of_many_pieces_grow_lighter_all_the_way():
    lightness = [luminance(paint(piece, 64).fill) for piece in range(64)]
    assert lightness == sorted(lightness)
    assert len(set(lightness)) == 64


@pytest.mark.parametrize("pieces", [1, 2, 8, 9, 64, 1000])
def test_numbers_stand_out_from_their_colour(pieces):
    for piece in range(pieces):
        colours = paint(piece, pieces)
        lights = sorted((luminance(colours.fill), luminance(colours.ink)))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5


# The terminal


def printed(items, width=100, **console):
    out = io.StringIO()
    Console(file=out, width=width, **console).print(draw_text(items))
    return out.getvalue()


def test_the_terminal_shows_pieces_beside_the_devices_that_hold_them():
    kernel = drawn("kernel", (784, 128), [None, "model"], Mesh(GRID))
    lines = [line.rstrip() for line in printed(kernel).splitlines()]
    assert lines[0] == "mesh  batch=4 down, model=2 across · 8 devices"
    assert "kernel  784 × 128 · 392 KiB · [unsharded, model]" in lines
    assert "  │ A: 0, 2, 4, 6 │ B: 1, 3, 5, 7 │ on │ A: 0 │ B: 1 │" in lines
    assert lines[-1] == "  2 pieces × 4 copies · each 784 × 64 · 196 KiB per device"


@pytest.mark.full_for("200-more devices than cells")
@every_sheet
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_picture_keeps_to_the_width(sheet, width):
    assert max(len(line) for line in printed(sheet, width).splitlines()) <= width


@every_sheet
def test_the_terminal_picture_can_do_without_colour_and_unicode(sheet):
    assert "\x1b" not in printed(sheet)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=out, width=80).print(draw_text(sheet))
    out.flush()
    assert out.buffer.getvalue().isascii()


def test_the_terminal_has_the_colours_of_the_svg():
    kernel = drawn("kernel", (784, 128), [None, "model"], Mesh(GRID))
    text = printed(kernel, force_terminal=True, color_system="truecolor", no_color=False)
    red, green, blue = (int(paint(1, 2).fill[i : i + 2], 16) for i in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}m" in text


def test_the_terminal_summarises_a_large_mesh():
    text = printed(SHEETS["large"], width=80)
    assert "…" in text
    assert "64 pieces × 8 copies" in text
    assert len(text.splitlines()) < 200


# show


def test_show_prints_a_layout_with_dims(capsys):
    mw.show(Layout([None, "model"], Mesh(GRID)), [784, 128], name="kernel")
    out = capsys.readouterr().out
    assert "kernel  784 × 128 · [unsharded, model]" in out
    assert "each 784 × 64" in out
    assert "B" in out
    assert "per device" not in out  # without a dtype the number of bytes is unknown


def test_show_prints_the_pieces_of_a_layout_without_dims(capsys):
    mw.show(Layout(["batch", "model"], Mesh(GRID)))
    out = capsys.readouterr().out
    assert "layout  [batch, model]" in out
    assert "H: 7" in out
    assert "each" not in out


def test_show_prints_a_mesh(capsys):
    mw.show(Mesh(GRID))
    assert "batch=4 down, model=2 across" in capsys.readouterr().out


def test_show_prints_a_jax_array(capsys):
    mesh = mw.create_mesh(GRID)
    array = jax.device_put(jnp.zeros((8, 6), "bfloat16"), Layout(["batch", None], mesh).sharding)
    mw.show(array, name="x")
    out = capsys.readouterr().out
    assert "x  8 × 6 · 96 B · [batch, unsharded]" in out
    assert "4 pieces × 2 copies" in out
    assert "24 B per device" in out


def test_show_prints_a_keras_variable_by_its_path(capsys):
    variable = keras.Variable(np.zeros((4, 2), "float32"), name="kernel")
    mw.show(variable)
    out = capsys.readouterr().out
    assert "kernel  4 × 2 · 32 B" in out
    assert "whole, on one device" in out


def test_show_says_what_it_cannot_show():
    with pytest.raises(LayoutError, match=r"ndarray has no layout to show\. Pass a Layout"):
        mw.show(np.zeros(3))
    with pytest.raises(LayoutError, match="is unbound"):
        mw.show(Layout(["batch"]), [4])
    with pytest.raises(LayoutError, match=r"dims=\(4,\) belong to a Layout; received a Mesh"):
        mw.show(Mesh(GRID), [4])


@pytest.mark.parametrize(
    "first",
    [
        "import meshwright.display.drawing",
        "from meshwright.display.drawing.svg import draw_svg",
        "pass",
    ],
)
def test_show_is_the_function_whatever_is_imported_first(first):
    code = f"""
        {first}
        import meshwright as mw
        mw.show(mw.Mesh({{"x": 2}}))
        import meshwright.display.drawing
        print(callable(mw.show))
        """
    assert run_in_fresh_process(code).endswith("True\n")


def test_drawing_touches_no_device():
    code = """
        import sys
        import meshwright as mw
        from meshwright.display.drawing import Drawn, draw_svg
        draw_svg(Drawn("x", (8,), mw.Layout(["x"], mw.Mesh({"x": 4}))))
        print("jax" in sys.modules)
        """
    assert run_in_fresh_process(code) == "False\n"
