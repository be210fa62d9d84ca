"""What the step of a pipeline costs by the planner's model: sections of a model, ticks, memory."""

from .cost import PipelineCost as PipelineCost
from .cost import Staging as Staging
from .cost import pipeline_cost as pipeline_cost
from .report import report_of as report_of
from .sections import sections_of as sections_of
from .ticking import Passes as Passes
from .ticking import step_s as step_s
