"""Layouts in the terminal, and what show takes."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from rich.console import Console
from sheets import GRID, SHEETS, drawn, every_sheet

import meshwright as mw
from meshwright import Layout, LayoutError, Mesh
from meshwright.display.drawing import draw_text
from meshwright.display.drawing.palette import paint
from meshwright.testing import run_in_fresh_process

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
