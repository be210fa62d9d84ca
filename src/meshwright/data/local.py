"""Sources of which each process reads its own part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class LocalRows:
    """Says that each process's source yields only the rows of its own devices.

    Without it, every process reads the same whole batches and keeps its part of them. ``source``
    is anything that ``fit`` takes as ``x``. Its batches have the rows of this process: with 4
    processes and a global batch of 128, 32 rows each. All processes must yield the same number of
    batches, and of rows in each.

    >>> import numpy as np, keras, meshwright as mw
    >>> strategy = mw.DataParallel(mw.create_mesh({"batch": 8}))
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> mine = ((np.ones([16, 4]), np.ones([16, 1])) for _ in range(3))
    >>> data = mw.LocalRows(mine)
    >>> history = strategy.fit(model, data, steps_per_epoch=3, shuffle=False, verbose=0)
    """

    source: Any
