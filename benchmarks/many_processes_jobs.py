"""What several processes train, on both sides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A model by its layers, its input, the rows of one process in a step, steps of an epoch."""

    what: str
    input: tuple[int, ...]
    layers: tuple[str, ...]
    rows_per_process: int
    steps: int


JOBS = {
    "mlp": Job(
        "MLP 784-1024-1024-10",
        (784,),
        ("dense:1024:relu", "dense:1024:relu", "dense:10"),
        64,
        60,
    ),
    "mlp_512": Job(
        "the same MLP",
        (784,),
        ("dense:1024:relu", "dense:1024:relu", "dense:10"),
        512,
        30,
    ),
    "deep": Job(
        "25 × Dense 256",
        (256,),
        (*("dense:256:relu",) * 24, "dense:10"),
        64,
        60,
    ),
    "cnn": Job(
        "CNN 32-64-dense 128",
        (28, 28, 1),
        ("conv:32", "pool", "conv:64", "pool", "flatten", "dense:128:relu", "dense:10"),
        64,
        12,
    ),
}
