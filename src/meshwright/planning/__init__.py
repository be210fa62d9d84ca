"""Know before you run: compile a step for a target that may not be there, and read the answer."""

from ..hlo.collectives import Collective as Collective
from ..hlo.collectives import most_bytes_at_once as most_bytes_at_once
from ..targets.target import Target as Target
from .ahead import Compiled as Compiled
from .ahead import compile_ahead as compile_ahead
from .ahead import compile_step as compile_step
