"""Pictures of meshes and layouts: SVG files and the terminal.

Nothing here touches a device; an abstract mesh is drawn as well as a bound one.
"""

from .sheet import Drawn as Drawn
from .sheet import Section as Section
from .sheet import Sheet as Sheet
from .svg import draw_svg as draw_svg
from .terminal import draw_text as draw_text
from .terminal import show as show
