"""Does a model train alike on every mesh? The same seed on one device and under each of them."""

from .cases import Case as Case
from .check import check as check
from .judging import Beyond as Beyond
from .judging import Difference as Difference
from .judging import Equivalence as Equivalence
from .judging import Gap as Gap
from .judging import UnderMesh as UnderMesh
