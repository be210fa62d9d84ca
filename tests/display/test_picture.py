"""Pictures of layouts: what they show is what JAX does, and they can be read."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple
from xml.etree import ElementTree

import jax
import pytest
from generated import abstract_meshes, bound_meshes, layouts
from hypothesis import given
from hypothesis import strategies as st
from sheets import GRID, SHEETS, SOLID, drawn, every_sheet

import meshwright as mw
from meshwright import MATCH, UNSHARDED, LayoutError, Mesh
from meshwright.display.drawing import Drawn, Section, draw_svg
from meshwright.display.drawing.canvas import text_width
from meshwright.display.drawing.tiling import Tiling

SVG = "{http://www.w3.org/2000/svg}"


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
    holders = sorted(p for piece in range(tiling.pieces) for p in tiling.holders(piece))
    assert holders == list(range(tiling.mesh.size))
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
    for word in words:
        assert word.left >= 0, word
        assert word.top >= 0, word
        assert word.right <= width, word
        assert word.bottom <= height, word
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
    texts = {word.text for word in words_of(parsed(draw_svg(kernel, title="One kernel")))}
    assert {"One kernel", "batch = 4", "model = 2", "8 devices"} <= texts
    assert {"784", "128 = 2 × 64", "[unsharded, model]", "2 pieces × 4 copies"} <= texts
    assert {"784 × 128 · 392 KiB", "196 KiB per device"} <= texts
    assert {str(number) for number in range(8)} <= texts


def test_a_large_mesh_is_summarised():
    svg = draw_svg(SHEETS["large"])
    texts = [word.text for word in words_of(parsed(svg))]
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
    assert "<a & b>" in {word.text for word in words_of(parsed(svg))}


def test_a_long_path_stands_in_two_lines_and_names_its_block():
    texts = [word.text for word in words_of(parsed(draw_svg(SHEETS["large"])))]
    at = texts.index("query/kernel")
    assert texts[at - 1] == "blocks/0/attention/"
    mesh = Mesh({"data": 32, "model": 16})
    names = [f"transformer/block_{i}/attention/query/kernel" for i in range(3)]
    sheet = [drawn(name, (64, 64), [None, "model"], mesh) for name in names]
    texts = [word.text for word in words_of(parsed(draw_svg(sheet)))]
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
