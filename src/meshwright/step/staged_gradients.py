"""The gradients of a step by stages, where the weights are updated elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from ..program import Batch, TrainState
from ..stages.running import Taken
from ..stages.staged import Staged
from .padding import rows_of
from .sharing import Sharing


@dataclass(frozen=True, eq=False)
class StagedGradients:
    """The gradients of a step by the stages of a pipeline, for who updates weights elsewhere."""

    staged: Staged
    sharing: Sharing

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is cut into micro-batches; a warning says so of one that is not."""
        if self.staged.takes(batch):
            return True
        self.staged.warn_of_none(rows_of(batch))
        return False

    def gradients(self, whole: TrainState, batch: Batch) -> Taken:
        """Gradients, state, metrics and logs of a state that is not stacked."""
        stacking = self.staged.stacking
        stacked = stacking.stack(whole)
        grads, state, metrics, logs = self.staged.gradients(stacked, batch)
        summed = TrainState(self.sharing.summed(grads, stacked.params), {}, {}, {})
        return stacking.unstack(summed).params, state, metrics, logs
