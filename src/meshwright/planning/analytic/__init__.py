"""The report on a step by the planner's model alone: a layout is given, and nothing is compiled."""

from .report import report_of as report_of
