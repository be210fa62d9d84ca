"""Equal blocks of a model: one and two of them compiled, and what that says of all of them."""

from .extended import Blocks as Blocks
from .fewer import Reduced as Reduced
from .fewer import reduced as reduced
from .heights import heights_of as heights_of
from .marks import unmarked as unmarked
