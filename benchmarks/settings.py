"""What is measured: the jobs, their sizes and the targets, fixed here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace

SEED = 7
DEVICES = 8
ROUNDS = 5
SAME_LOSS = 1.02  # rounding alone, amplified by Adam, has moved a job's loss by 1.7 %

Spec = tuple[str | None, ...]  # per dim of a parameter: the axis it lies along, or None


@dataclass(frozen=True)
class Job:
    """One network trained on one mesh; every side of a comparison reads the same values."""

    name: str
    says: str
    network: str  # "mlp" or "convolutional"
    mesh: tuple[tuple[str, int], ...]
    layouts: tuple[tuple[str, Spec], ...]  # parameter path -> spec; what is not named is whole
    steps_per_epoch: int
    epochs: int  # the first one compiles and warms up; it is not measured
    learning_rate: float
    batch_size: int = 128
    zero: int = 0  # a switch of ours; the peers keep every slot whole

    @property
    def examples(self) -> int:
        return self.batch_size * self.steps_per_epoch

    @property
    def measured_steps(self) -> int:
        return self.steps_per_epoch * (self.epochs - 1)


@dataclass(frozen=True)
class Pair:
    """Ours against one peer in one job, and the ratio that is wanted.

    ``measure`` is "time" (ours over the peer's, at most ``target``) or "speed" (our steps per
    second over the peer's, at least ``target``).
    """

    job: str
    peer: str
    measure: str
    target: float
    same_or_better_loss: bool = False


MLP_SPLIT: tuple[tuple[str, Spec], ...] = (
    ("hidden/kernel", (None, "model")),
    ("hidden/bias", ("model",)),
    ("output/kernel", ("model", None)),
)

MLP_8 = Job(
    name="mlp_8",
    says="MLP 784-128-10, Adam, batch=8",
    network="mlp",
    mesh=(("batch", 8),),
    layouts=(),
    steps_per_epoch=100,
    epochs=6,
    learning_rate=0.01,
)

JOBS = {
    job.name: job
    for job in (
        MLP_8,
        replace(MLP_8, name="mlp_8_zero", says="the same, ours with zero=1", zero=1),
        replace(
            MLP_8,
            name="mlp_4x2",
            says="MLP 784-128-10, Adam, batch=4, model=2",
            mesh=(("batch", 4), ("model", 2)),
            layouts=MLP_SPLIT,
        ),
        Job(
            name="convolutional_8",
            says="convolutional net 32-64-128-dense, Adam, batch=8",
            network="convolutional",
            mesh=(("batch", 8),),
            layouts=(),
            steps_per_epoch=20,
            epochs=4,
            learning_rate=0.001,
        ),
    )
}

# Sides by name: the script that measures them, and what it is told besides the job.
OURS = "ours"
HAND_WRITTEN = "hand_written"
KERAS = "keras_data_parallel"
TENSORFLOW = "tf_dtensor"
TENSORFLOW_RIGHT = "tf_dtensor_right"

PAIRS = (
    Pair("mlp_8", HAND_WRITTEN, "time", 1.10),
    Pair("mlp_4x2", HAND_WRITTEN, "time", 1.10),
    Pair("convolutional_8", HAND_WRITTEN, "time", 1.05),
    Pair("mlp_8", TENSORFLOW, "speed", 3.0, same_or_better_loss=True),
    Pair("mlp_8_zero", TENSORFLOW, "speed", 3.0, same_or_better_loss=True),
    Pair("mlp_4x2", TENSORFLOW, "speed", 3.0, same_or_better_loss=True),
    Pair("mlp_8", TENSORFLOW_RIGHT, "speed", 3.0, same_or_better_loss=True),
    Pair("mlp_4x2", TENSORFLOW_RIGHT, "speed", 3.0, same_or_better_loss=True),
    Pair("mlp_8", KERAS, "time", 1.0),
    Pair("convolutional_8", KERAS, "time", 1.0),
)

IMPORT_LIMIT_S = 0.3
HELP_LIMIT_S = 0.5
START_UP_RUNS = 9
