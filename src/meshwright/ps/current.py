"""``mw.get_strategy()``: the strategy in whose scope the program is."""

from __future__ import annotations

from typing import Any

import jax
import keras

from ..frontends.keras import DataParallel, Sharded
from ..layouts.mesh import Mesh
from .strategy import current_strategy


def get_strategy() -> Any:
    """The strategy whose ``scope()`` is entered; outside, one that has a single device.

    That is a :class:`~meshwright.Sharded` or a :class:`~meshwright.ParameterServer`. The same as
    TensorFlow's ``tf.distribute.get_strategy()``.

    >>> import meshwright as mw
    >>> strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    >>> with strategy.scope():
    ...     print(get_strategy() is strategy, get_strategy().num_replicas_in_sync)
    True 8
    >>> get_strategy().num_replicas_in_sync
    1
    """
    current = current_strategy() or keras.distribution.distribution()
    if isinstance(current, keras.distribution.DataParallel | keras.distribution.ModelParallel):
        return Sharded.from_keras(current)
    return current or DataParallel(Mesh.from_device(jax.local_devices()[0]))
