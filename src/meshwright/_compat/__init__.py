"""Every version test and every private import of JAX and Keras, each with its version and reason.

Nothing heavy is imported before it is used: ``import meshwright`` must stay fast.
"""

from __future__ import annotations

from .batches import *
from .hooks import *
from .messages import *
from .models import *
from .preemption import *
from .programs import *
from .settings import *
from .training import *
from .variables import *
