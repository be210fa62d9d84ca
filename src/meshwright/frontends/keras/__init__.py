"""The Keras front end: strategies as a ``keras.distribution.Distribution``, layouts on layers."""

from . import layers as layers  # also lets files that carry layouts bring them back
from .data_parallel import DataParallel as DataParallel
from .sharded import Sharded as Sharded
from .sharded import layout_map_scope as layout_map_scope
