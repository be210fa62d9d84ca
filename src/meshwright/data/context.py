"""What a function that makes a dataset receives: for which of how many inputs it makes it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BatchError


@dataclass(frozen=True)
class InputContext:
    """Which process or worker a ``dataset_fn`` makes a dataset for, and how many there are.

    ``worker_index`` counts the inputs, from 0 to ``num_workers`` - 1.
    In synchronous training each process reads rows of its own, and a global batch is shared out
    over ``num_replicas_in_sync`` replicas. Parameter servers hand elements out on demand, each to
    one worker, so a dataset need not be cut by worker there; it may well be, with
    ``InputOptions("copy")``.

    >>> InputContext(1, 2, num_replicas_in_sync=8).get_per_replica_batch_size(64)
    8
    """

    worker_index: int = 0
    num_workers: int = 1
    num_replicas_in_sync: int = 1

    @property
    def input_pipeline_id(self) -> int:
        """TensorFlow's name for ``worker_index``."""
        return self.worker_index

    @property
    def num_input_pipelines(self) -> int:
        """TensorFlow's name for ``num_workers``."""
        return self.num_workers

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of one replica; with parameter servers the whole batch is one worker's step.

        Raises :class:`~meshwright.BatchError` if the batch does not divide over the replicas.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise BatchError(
                f"a batch of {global_batch_size} rows does not divide over "
                f"{self.num_replicas_in_sync} replicas; the next that does has "
                f"{(size + 1) * self.num_replicas_in_sync}."
            )
        return size
