"""Know before you run: compile a step for a target that may not be there, and read the answer.

The process that compiles is a module of this room and loads JAX only once it knows its platform,
so what others use of this room is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from ..hlo.collectives import Collective as Collective
    from ..hlo.collectives import most_bytes_at_once as most_bytes_at_once
    from ..targets.target import Target as Target
    from .ahead import Compiled as Compiled
    from .ahead import compile_ahead as compile_ahead
    from .ahead import compile_step as compile_step

_LAZY = {  # name -> the module that it lives in
    **dict.fromkeys(("Compiled", "compile_ahead", "compile_step"), "ahead"),
    **dict.fromkeys(("Collective", "most_bytes_at_once"), ".hlo.collectives"),
    "Target": ".targets.target",
}

__getattr__ = lazily(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
