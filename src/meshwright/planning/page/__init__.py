"""A dry run, or a plan, as one page for a browser: pure functions from values to HTML.

Needs no server and no network; pictures are SVG, and the few lines of script only sort and filter
tables that are whole without them.
"""

from .document import of_dry_run as of_dry_run
from .document import of_pair as of_pair
from .document import of_plan as of_plan
