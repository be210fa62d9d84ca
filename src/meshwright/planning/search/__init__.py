"""The search: a cost model of a graph, the best of all layouts by it, and the plan of that."""

from .branch_and_bound import search as search
from .choices import Choices as Choices
from .choices import Cost as Cost
from .choices import Layouts as Layouts
from .cost import cost as cost
from .plan import Option as Option
from .plan import Plan as Plan
from .planner import plan_step as plan_step
from .request import Space as Space
