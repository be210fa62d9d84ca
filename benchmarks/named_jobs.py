"""What the named language is measured on: two programs, three ways to lay each out, fixed here.

A training step is the loss, its gradients and plain gradient descent; the batch stays on the
devices. Every side begins with the same numbers and reports the same losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DEVICES = 8
WARM_UP_STEPS = 5
STEPS = 10  # of one measurement; the fastest of several counts
MEASUREMENTS = 8
LEARNING_RATE = 0.01
SAME_LOSS = 1e-3

Array = np.ndarray


@dataclass(frozen=True)
class NamedJob:
    """One program under one string of rules."""

    name: str
    says: str
    program: str  # "mlp" or "block"
    mesh: str
    layout: str


DIMS = {
    "mlp": {"batch": 1024, "io": 512, "hidden": 2048},
    "block": {"batch": 16, "length": 128, "d_model": 256, "d_ff": 1024, "heads": 8, "d_kv": 32},
}

PARAMETERS = {
    "mlp": {"w": "io hidden", "v": "hidden io"},
    "block": {
        "scale_1": "d_model",
        "q": "d_model heads d_kv",
        "k": "d_model heads d_kv",
        "v": "d_model heads d_kv",
        "o": "heads d_kv d_model",
        "scale_2": "d_model",
        "wi": "d_model d_ff",
        "wo": "d_ff d_model",
    },
}

DATA = {"mlp": "batch io", "block": "batch length d_model"}

JOBS = {
    job.name: job
    for job in (
        NamedJob("mlp_data", "2-layer MLP, data parallel", "mlp", "all:8", "batch:all"),
        NamedJob("mlp_model", "2-layer MLP, model parallel", "mlp", "all:8", "hidden:all"),
        NamedJob("mlp_4x2", "2-layer MLP, 4 x 2", "mlp", "rows:4;cols:2", "batch:rows;hidden:cols"),
        NamedJob("block_data", "Transformer block, data parallel", "block", "all:8", "batch:all"),
        NamedJob(
            "block_model",
            "Transformer block, model parallel",
            "block",
            "all:8",
            "d_ff:all;heads:all",
        ),
        NamedJob(
            "block_4x2",
            "Transformer block, 4 x 2",
            "block",
            "rows:4;cols:2",
            "batch:rows;d_ff:cols;heads:cols",
        ),
    )
}


def sizes(program: str, dims: str) -> tuple[int, ...]:
    return tuple(DIMS[program][dim] for dim in dims.split())


def initial(job: NamedJob) -> tuple[dict[str, Array], Array, Array]:
    """Parameters, inputs and targets."""
    random = np.random.default_rng(7)

    def normal(dims: str, deviation: float) -> Array:
        return (deviation * random.normal(size=sizes(job.program, dims))).astype("float32")

    parameters = {
        name: np.ones(sizes(job.program, dims), "float32")
        if name.startswith("scale")
        else normal(dims, 0.03)
        for name, dims in PARAMETERS[job.program].items()
    }
    return parameters, normal(DATA[job.program], 1.0), normal(DATA[job.program], 1.0)


def layout(text: str) -> dict[str, str]:
    """``"batch:rows;hidden:cols"`` as a dictionary."""
    return dict(pair.split(":") for pair in text.split(";"))
