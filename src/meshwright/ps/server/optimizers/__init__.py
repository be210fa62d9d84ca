"""Keras' optimizers in NumPy, for servers that load no Keras."""

from .base import Block as Block
from .base import Moment as Moment
from .base import Twin as Twin
from .schedules import Schedule as Schedule
from .table import REFUSED as REFUSED
from .table import TWINS as TWINS
from .table import phase as phase
from .table import twin_of as twin_of
