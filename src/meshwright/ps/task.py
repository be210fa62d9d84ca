"""A task of a cluster: what ``python -m meshwright.ps.task`` and :func:`run_task` do.

Nothing heavy is imported before the task is known: a server never loads JAX or Keras.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
from collections.abc import Callable, Mapping

from ..errors import MeshwrightError
from ..launch.cluster import ThisProcess
from ..launch.generations import next_generation
from ..launch.joining import GENERATION, settings_from
from ..launch.resolvers import ClusterResolver, resolve, tells_of_cluster
from ..launch.settings import TaskSettings
from ..launch.tie import tie_from_environment

_ENTRIES = {  # job -> what it does until it is told to stop
    "ps": ("meshwright.ps.server.loop", "serve"),
    "worker": ("meshwright.ps.worker.loop", "work"),
}
_INTERRUPTED = 128 + signal.SIGINT


def run_task(environment: Mapping[str, str] | None = None) -> ClusterResolver | ThisProcess:
    """Be the task of a cluster that the environment describes, as on Slurm or Kubernetes.

    ``environment`` stands in for ``os.environ``. In a server or a worker it does that task's work
    and then ends the process (``SystemExit``), so what comes after it in a script is the chief's.
    In the chief, and in an evaluator, it returns the resolver, for ``ParameterServer``; where no
    variable describes a cluster, :class:`~meshwright.launch.ThisProcess`: everything in this
    process. What it returns is not for ``with``: write
    ``with ParameterServer(run_task()) as strategy``.

    >>> run_task({"HOME": "/"})
    ThisProcess()

    Raises :class:`~meshwright.errors.ClusterError` where variables are missing or wrong, where
    the task's address is taken, or where other hosts could connect without keys.
    """
    tie_from_environment()
    if not tells_of_cluster(environment):
        return ThisProcess()
    settings = settings_from(environment)
    if settings.task.job not in _ENTRIES:
        return resolve(environment)
    _do(_counted(settings, os.environ if environment is None else environment))
    raise SystemExit(0)


def _counted(settings: TaskSettings, variables: Mapping[str, str]) -> TaskSettings:
    # Whatever starts a server anew elsewhere (Kubernetes, systemd) does not say that it is anew.
    if settings.task.job != "ps" or not settings.snapshot_dir or variables.get(GENERATION):
        return settings
    generation = next_generation(settings.snapshot_dir, settings.task)
    return dataclasses.replace(settings, generation=generation)


def _do(settings: TaskSettings) -> None:
    module, name = _ENTRIES[settings.task.job]
    entry: Callable[[TaskSettings], None] = getattr(importlib.import_module(module), name)
    # Not before: SystemExit during an import comes out as that import's error.
    signal.signal(signal.SIGTERM, _end)
    try:
        entry(settings)
    except KeyboardInterrupt:  # the chief reports it, and not each task
        raise SystemExit(_INTERRUPTED) from None


def _end(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def main() -> None:
    """Be the task; an error that is raised on purpose is one message, without a traceback."""
    try:
        run_task()
    except MeshwrightError as error:
        lines = [str(error), *getattr(error, "__notes__", ())]
        raise SystemExit("Error: " + "\n".join(lines)) from None
    raise SystemExit(
        "Error: no variable says which server or worker this is. `meshwright launch` starts a "
        "cluster on this machine."
    )


if __name__ == "__main__":
    main()
