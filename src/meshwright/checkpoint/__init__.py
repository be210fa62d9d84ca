"""Checkpoints that outlive their mesh: logical arrays by path, written while training goes on."""

from .files import reader as reader
from .record import PARTS as PARTS
from .record import CheckpointInfo as CheckpointInfo
from .record import Position as Position
from .record import SavedArray as SavedArray
from .record import newest_paths as newest_paths
from .record import read_checkpoint as read_checkpoint
from .record import written_as as written_as
from .store import Checkpoints as Checkpoints
from .store import restore_state as restore_state
