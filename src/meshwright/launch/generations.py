"""How often a task was started before, counted in its folder where no supervisor counts."""

from __future__ import annotations

from pathlib import Path

from ..errors import ClusterError
from .spec import Task


def next_generation(folder: str, task: Task) -> int:
    """Count one more start of a task over this folder; the first is generation 0.

    Raises :class:`~meshwright.errors.ClusterError` where the folder cannot be written to.
    """
    counter = Path(folder) / f"{task.job}{task.index}.starts"
    try:
        counter.parent.mkdir(parents=True, exist_ok=True)
        generation = int(counter.read_text()) if counter.exists() else 0
        written = counter.with_suffix(".new")  # a count that is half written is never seen
        written.write_text(str(generation + 1))
        written.replace(counter)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"the starts of {task} cannot be counted in {str(counter)!r}: {error}. "
            "Give MESHWRIGHT_SNAPSHOTS a folder that can be written to."
        ) from error
    return generation
