"""How tensors are cut over a mesh: pictures of :mod:`meshwright.drawing` in a page.

Their colours are those of paper. The page's style sheet knows them and turns them for dark rooms.
"""

from __future__ import annotations

from ...drawing import Drawn
from ...drawing.canvas import Canvas
from ...drawing.tensor import COLUMN, Frame, draw_tensor
from ...drawing.tiling import Tiling
from ...drawing.words import copies_text, specs_text
from .markup import Html

_ROOM = 14.0  # around a picture


class Picture(Canvas):
    """A canvas whose paints bear names of their own: a page holds many pictures."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def hatch(self, fill: str, pale: str) -> str:
        """As :meth:`Canvas.hatch`, under the name of this picture."""
        paint = super().hatch(fill, pale)
        plain, own = f"mw-{fill[1:]}", f"{self._name}-{fill[1:]}"
        self._definitions[plain] = self._definitions[plain].replace(f'"{plain}"', f'"{own}"')
        return paint.replace(plain, own)

    def done(self, width: float, height: float, title: str, told: str) -> Html:
        """The picture, without a paper of its own."""
        return Html(self.finish(width, height, title, told, "none", "none"))


def tiling_picture(name: str, drawn: Drawn) -> Html:
    """A tensor cut into its pieces, and under it the devices that hold them.

    ``name`` is one for the picture that no other of the page has.
    """
    tiling = Tiling.of(drawn)
    frame = Frame.around(tiling.mesh, [tiling])
    canvas = Picture(name)
    draw_tensor(canvas, tiling, frame, _ROOM, _ROOM)
    told = f"{specs_text(drawn.layout)}: {copies_text(tiling)}"
    return canvas.done(COLUMN + 2 * _ROOM, frame.height + 2 * _ROOM, drawn.name, told)
