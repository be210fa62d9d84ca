"""Know before you run: compile a step for a target that may not be there, and read the answer."""

from .ahead import Compiled as Compiled
from .ahead import compile_ahead as compile_ahead
from .ahead import compile_step as compile_step
from .collectives import Collective as Collective
from .collectives import most_bytes_at_once as most_bytes_at_once
from .target import Target as Target
