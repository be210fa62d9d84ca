"""Dims that a step's arrays have in common, inferred from its trace: what a planner splits.

``graph_of_step`` follows a training step through every operation, forwards, backwards and through
the update, and joins dims that must lie alike. What no rule is known for joins nothing and is done
whole, so that a missing rule costs communication in the plan, and never makes a false one.
"""

from .names import Argument as Argument
from .tracing import graph_of as graph_of
from .tracing import graph_of_step as graph_of_step
from .tracing import unknown_kinds as unknown_kinds
from .volumes import Volume as Volume
from .volumes import communication as communication
