"""Draw the tick tables of the documentation: ``python tools/tick_pictures.py`` writes
``docs/pictures/ticks_*.svg``.

The stages are those of the Transformer in the guide to pipelines: the last one has the head.
"""

from __future__ import annotations

from pathlib import Path

import meshwright as mw
from meshwright.display.drawing.ticks import tick_table_svg

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
SHARES = (0.227, 0.227, 0.227, 0.318)  # of the FLOPs, as explain() shows them


def drawn(schedule: str) -> str:
    """The text of a picture."""
    return tick_table_svg(mw.Pipeline("stage", 8, schedule).table(len(SHARES)), SHARES)


if __name__ == "__main__":
    for schedule in ("1f1b",):
        path = PICTURES / f"ticks_{schedule}.svg"
        path.write_text(drawn(schedule))
        print(path)
