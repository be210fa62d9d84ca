"""Training loops over Programs, at three heights: a step, a generator of steps, a whole run."""

from .loop import StepInfo as StepInfo
from .loop import Trainer as Trainer
