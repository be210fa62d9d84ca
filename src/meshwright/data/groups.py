"""Which processes read the same rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from ..errors import DataError
from ..layouts.layout import Layout
from ..layouts.placement import Placement


@dataclass(frozen=True)
class Group:
    """Which processes read the same rows as this one: group ``index`` of ``number``."""

    index: int
    number: int

    @classmethod
    def of(cls, placement: Placement) -> Group:
        """That of this process, where batches lie along the placement's axes."""
        pieces = placement.batch_shards
        axes = placement.batch_axes or None
        layout = Layout([axes], placement.mesh)
        rows_of: dict[int, set[int]] = {}
        for device, (rows, *_) in layout.sharding.devices_indices_map((pieces,)).items():
            rows_of.setdefault(device.process_index, set()).add(rows.start or 0)
        groups = sorted({tuple(sorted(rows)) for rows in rows_of.values()})
        if sum(map(len, groups)) != pieces:
            raise DataError(
                "mw.shard: processes share some rows of a batch and not others on the mesh "
                f"{placement.mesh.axes_text}. Put the axes of the batch first, or use by='off'."
            )
        return cls(groups.index(tuple(sorted(rows_of[jax.process_index()]))), len(groups))

    @classmethod
    def of_processes(cls) -> Group:
        """Every process reads rows of its own."""
        return cls(jax.process_index(), jax.process_count())
