"""The short texts that stand in pictures: numbers of devices, bytes, dims, copies."""

from __future__ import annotations

from collections.abc import Sequence

from ...indices import runs
from ...layouts.layout import Layout
from ...layouts.mesh import Mesh
from .tiling import Tiling, mesh_grid

TIMES = "\N{MULTIPLICATION SIGN}"
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
DOT = "\N{MIDDLE DOT}"
DASH = "\N{EN DASH}"


def dims_text(dims: Sequence[int]) -> str:
    """``"784 × 128"``; a tensor without dims is a scalar."""
    return f" {TIMES} ".join(str(size) for size in dims) if dims else "scalar"


def specs_text(layout: Layout) -> str:
    """The layout without its mesh, as the user writes it: ``"[unsharded, model]"``."""
    return str(layout.unbound())


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers with runs drawn together.

    >>> numbers_text([0, 1, 2, 3]), numbers_text([0, 2, 4])
    ('0–3', '0, 2, 4')
    """
    return ", ".join(_run_text(first, last) for first, last in runs(numbers))


def _run_text(first: int, last: int) -> str:
    if last - first < 2:
        return ", ".join(str(number) for number in range(first, last + 1))
    return f"{first}{DASH}{last}"


def numbers_shorter(numbers: Sequence[int]) -> list[str]:
    """Ways to name the numbers, from the fullest to the shortest; the caller takes what fits.

    >>> numbers_shorter([0, 2, 4, 6])
    ['0, 2, 4, 6', '0, 2 … 6', '0 … 6', '0…']
    """
    ways = [numbers_text(numbers)]
    if len(numbers) > 3:
        ways.append(f"{numbers[0]}, {numbers[1]} {ELLIPSIS} {numbers[-1]}")
    if len(numbers) > 2:
        ways.append(f"{numbers[0]} {ELLIPSIS} {numbers[-1]}")
    if len(numbers) > 1:
        ways.append(f"{numbers[0]}{ELLIPSIS}")
    return ways


def devices_text(mesh: Mesh) -> str:
    """How many devices of which platform a mesh has: ``"8 CPU devices"``."""
    noun = "device" if mesh.size == 1 else "devices"
    return " ".join(filter(None, (str(mesh.size), (mesh.platform or "").upper(), noun)))


def directions_text(mesh: Mesh) -> str:
    """The axes with the direction in which a grid shows them.

    >>> directions_text(Mesh({"batch": 4, "model": 2}))
    'batch=4 down, model=2 across'
    """
    ways = ["by plane"] * (len(mesh.axes) - 2) + ["down", "across"][-len(mesh.axes) :]
    if len(ways) == 1 and mesh_grid(mesh).rows > 1:
        ways = ["row by row"]
    pairs = zip(mesh.axes, ways, strict=True)
    return ", ".join(f"{axis}={size} {way}" for (axis, size), way in pairs)


def copies_text(tiling: Tiling) -> str:
    """How many pieces there are, and on how many devices each of them lies."""
    pieces, copies = tiling.pieces, tiling.copies
    if tiling.mesh.size == 1:
        return "whole, on one device"
    if pieces == 1:
        return f"whole on all {copies} devices"
    if copies == 1:
        return f"{pieces} pieces, no copies"
    return f"{pieces} pieces {TIMES} {copies} copies"


def size_text(tiling: Tiling, dims: Sequence[int]) -> str:
    """The sizes of some dims along one direction; for one that is cut, number and size of pieces.

    >>> from meshwright.display.drawing import Drawn
    >>> drawn = Drawn("x", (128, 784), Layout(["batch", None], Mesh({"batch": 8})))
    >>> size_text(Tiling.of(drawn), (0,)), size_text(Tiling.of(drawn), (1,))
    ('128 = 8 × 16', '784')
    """
    names, sizes = tiling.drawn.dim_names, tiling.drawn.dims
    if len(dims) == 1:
        (dim,) = dims
        text = str(sizes[dim])
        if tiling.counts[dim] > 1:
            text += f" = {tiling.counts[dim]} {TIMES} {tiling.local_dims[dim]}"
        return f"{_dim_name(tiling, dim)} {text}".strip()
    if names:
        return f" {DOT} ".join(f"{names[dim]} {sizes[dim]}" for dim in dims)
    return f" {TIMES} ".join(str(sizes[dim]) for dim in dims)


def hidden_text(tiling: Tiling) -> str:
    """What the picture leaves out, as ``"not drawn: dims 1, 3"``; empty if it shows all."""
    hidden = tiling.directions.hidden(len(tiling.counts))
    if not hidden:
        return ""
    names, sizes = tiling.drawn.dim_names, tiling.drawn.dims
    if names:
        return f"not drawn: {f' {DOT} '.join(f'{names[dim]} {sizes[dim]}' for dim in hidden)}"
    return f"not drawn: dim{'s' * (len(hidden) > 1)} {', '.join(map(str, hidden))}"


def piece_text(tiling: Tiling, piece: int, numbers: Sequence[int]) -> str:
    """One piece in full: ``"[0:784, 0:64] on devices 0, 2, 4, 6"``; ``numbers`` by position."""
    bounds = ", ".join(f"{first}:{end}" for first, end in tiling.bounds(piece))
    holders = [numbers[position] for position in tiling.holders(piece)]
    noun = "device" if len(holders) == 1 else "devices"
    return f"{tiling.drawn.name}[{bounds}] on {noun} {numbers_text(holders)}"


def _dim_name(tiling: Tiling, dim: int) -> str:
    """The dim's own name; else its number where its place in the picture does not tell it."""
    if tiling.drawn.dim_names:
        return tiling.drawn.dim_names[dim]
    return f"dim {dim}:" if len(tiling.counts) > 2 else ""


def direction_texts(tiling: Tiling) -> list[str]:
    """What runs along planes, rows and columns of a picture, and what it leaves out."""
    words = ("planes", "down", "across")
    along = zip(words, tiling.directions, strict=True)
    texts = [f"{word} {size_text(tiling, dims)}" for word, dims in along if dims]
    return [*texts, hidden_text(tiling)] if hidden_text(tiling) else texts


def letters(number: int) -> str:
    """A name for a piece, as spreadsheets name columns.

    >>> letters(0), letters(25), letters(26)
    ('A', 'Z', 'AA')
    """
    name = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def plain(text: str) -> str:
    """The text in ASCII, for terminals that have nothing else."""
    return text.translate(str.maketrans({TIMES: "x", ELLIPSIS: "...", DOT: "-", DASH: "-"}))
