"""Runs of training: one loop over epochs, and the ways in which its steps are taken."""

from .trainer import StepInfo as StepInfo
from .trainer import Trainer as Trainer
