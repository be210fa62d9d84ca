"""A batch with rows that do not count, so that it divides over the devices.

Only what goes into the model is padded. What comes out is cut back to the true rows inside the
step, before losses and metrics see it: they compute, in whatever way, what they would on one
device. It is exact where added rows leave the others as they were; ``jaxprs/rows.py`` finds out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from ..errors import ModelError


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["rows", "mesh"])
@dataclass(frozen=True)
class Padded:
    """A batch whose inputs have more rows than the first ``rows`` that count.

    ``arrays`` is the batch; its targets and sample weights have the true rows only. ``mesh`` is
    the :class:`jax.sharding.Mesh` it lies on. A pytree: steps are compiled per number of rows.
    """

    arrays: Any
    rows: int
    mesh: Any

    def true(self, tree: Any) -> Any:
        """The true rows of what was computed from the inputs, or of the inputs themselves.

        Every device gets all of them, for they divide over nothing.
        """
        return jax.tree.map(self._true, tree)

    def _true(self, array: Any) -> Any:
        spec = jax.sharding.PartitionSpec
        free = [spec.UNCONSTRAINED] * (array.ndim - 1)
        whole = jax.sharding.NamedSharding(self.mesh, spec(None, *free))
        return jax.lax.with_sharding_constraint(array[: self.rows], whole)


def rows_of(batch: Any) -> int:
    """How many rows of a batch count: the first dim of its first array that has dims.

    Raises :class:`~meshwright.ModelError` where none has.

    >>> import numpy as np
    >>> rows_of((np.ones([6, 2]), np.ones([6])))
    6
    """
    if isinstance(batch, Padded):
        return batch.rows
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    rows = next((shape[0] for shape in shapes if shape), None)
    if rows is None:
        raise ModelError(
            f"expected a batch with rows, an array of one dim or more; received {len(shapes)} "
            "scalar(s). With accumulate= above 1 each micro-batch counts by its rows."
        )
    return rows
