"""The demo's three runs as values: what is trained, and how it lies on which mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from .. import UNSHARDED, MeshwrightError

BATCH_SIZE = 128  # of the whole mesh
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Job:
    """One run: a model that knows nothing of the mesh, and beside it the mesh and the layouts."""

    name: str
    title: str
    axes: Mapping[str, int]
    build: Callable[[], keras.Model]
    split: str  # what lies split over the mesh, in words
    layouts: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ("batch", UNSHARDED, UNSHARDED)  # of the images (batch, 28, 28)

    @property
    def heading(self) -> str:
        """``"(a) data"``."""
        return f"({self.name}) {self.title}"


def build_mlp() -> keras.Model:
    """784-128-10, for one device as for any mesh."""
    return keras.Sequential(
        [
            keras.Input([28, 28]),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", name="output"),
        ],
        name="mlp",
    )


def build_convnet() -> keras.Model:
    """Two convolutions; every height and width in it (28, 14, 2) divides over an axis of two."""
    conv = functools.partial(keras.layers.Conv2D, padding="same", activation="relu")
    return keras.Sequential(
        [
            keras.Input([28, 28]),
            keras.layers.Reshape([28, 28, 1]),
            conv(8, 5, strides=2, name="edges"),
            conv(16, 5, name="strokes"),
            keras.layers.MaxPooling2D(7),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax", name="output"),
        ],
        name="convnet",
    )


JOBS = (
    Job(
        name="a",
        title="data",
        axes={"batch": 8},
        build=build_mlp,
        split="images split over 8 devices",
    ),
    Job(
        name="b",
        title="data, model",
        axes={"batch": 4, "model": 2},
        build=build_mlp,
        split="images split over 4 rows of devices, dense layers over 2 columns",
        layouts={
            "hidden.*kernel": [UNSHARDED, "model"],
            "hidden.*bias": ["model"],
            "output.*kernel": ["model", UNSHARDED],
        },
    ),
    Job(
        name="c",
        title="data, space",
        axes={"batch": 2, "rows": 2, "cols": 2},
        build=build_convnet,
        split="images split over 2 planes of devices, their height and width over 2 × 2",
        inputs=("batch", "rows", "cols"),
    ),
)


def chosen(names: str | Sequence[str]) -> list[Job]:
    """The jobs with these names, as ``"a,c"`` or ``["a", "c"]``, in the order of :data:`JOBS`.

    Raises :class:`~meshwright.MeshwrightError` for a name that is none of them.

    >>> [job.title for job in chosen("a, b")]
    ['data', 'data, model']
    """
    wanted = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    titles = ", ".join(f"{job.name} ({job.title})" for job in JOBS)
    if not wanted:
        raise MeshwrightError(f"no run was chosen. The demo's runs are {titles}.")
    unknown = [name for name in wanted if name not in [job.name for job in JOBS]]
    if unknown:
        raise MeshwrightError(
            f"unknown run {', '.join(map(repr, unknown))}. The demo's runs are {titles}."
        )
    return [job for job in JOBS if job.name in wanted]
