"""Which tasks a cluster has, and where: values that know no sockets and no processes.

The names are those of ``tf.train.ClusterSpec``: jobs ``chief``, ``worker``, ``ps`` and
``evaluator``, each a list of addresses, or a mapping from index to address where some are missing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ClusterError
from .addresses import ADDRESS_FORM, split_address

JOBS = ("chief", "worker", "ps", "evaluator")
RANK = "rank"  # the job of all processes of a synchronous group, which has no ClusterSpec

Job = Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, order=True)
class Task:
    """One task of a cluster: its job and its index in it.

    Raises :class:`~meshwright.errors.ClusterError` for a job that is not known, or no index.

    >>> str(Task("worker", 1)), Task.parse("ps:0")
    ('worker:1', Task(job='ps', index=0))
    """

    job: str
    index: int = 0

    def __post_init__(self) -> None:
        faults = [] if self.job in (*JOBS, RANK) else [_unknown_job(self.job)]
        if not _is_index(self.index):
            faults.append(
                f"index {self.index!r} of a task: indices must be whole numbers, at least 0."
            )
        if faults:
            raise ClusterError("\n".join(faults))

    def __str__(self) -> str:
        return f"{self.job}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """The task that a string such as ``"worker:1"`` names; a bare ``"chief"`` is ``"chief:0"``.

        Raises :class:`~meshwright.errors.ClusterError` for any other text.
        """
        match = re.fullmatch(r"\s*([^:\s]+)(?::(\d+))?\s*", text)
        if match is None:
            raise ClusterError(f"expected a task such as 'worker:1' or 'chief'; received {text!r}.")
        return cls(match[1], int(match[2] or 0))


@dataclass(frozen=True, init=False)
class ClusterSpec:
    """The tasks of a cluster and their addresses: ``"host:port"``, or ``"ipc://path"`` on one host.

    ``jobs`` maps each job to a list of addresses, or to a mapping from index to address (sparse).
    There is at least one ``worker`` and one ``ps``, and at most one ``chief``. Raises
    :class:`~meshwright.errors.ClusterError`, which names every fault at once.

    >>> spec = ClusterSpec({"worker": {1: "b:1", 3: "d:1"}, "ps": ["a:1"]})
    >>> spec.num_tasks("worker"), spec.task_indices("worker"), spec.job_tasks("worker")
    (2, [1, 3], [None, 'b:1', None, 'd:1'])
    >>> spec.task_address("ps", 0)
    'a:1'
    """

    _jobs: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]

    def __init__(self, jobs: ClusterSpec | Mapping[str, Job]) -> None:
        entries = dict(jobs._jobs) if isinstance(jobs, ClusterSpec) else _entries(jobs)
        faults = _faults(entries)
        if faults:
            raise ClusterError("\n".join(faults))
        ordered = sorted(entries, key=JOBS.index)
        object.__setattr__(self, "_jobs", tuple((j, tuple(entries[j])) for j in ordered))

    @property
    def jobs(self) -> list[str]:
        """The jobs that have tasks, chief first."""
        return [job for job, _ in self._jobs]

    @property
    def tasks(self) -> list[Task]:
        """Every task, job by job."""
        return [Task(job, index) for job, tasks in self._jobs for index, _ in tasks]

    def num_tasks(self, job: str) -> int:
        """How many tasks a job has. Raises :class:`ClusterError` for an unknown job."""
        return len(self._of(job))

    def task_indices(self, job: str) -> list[int]:
        """The indices of a job's tasks, ascending."""
        return list(self._of(job))

    def task_address(self, job: str, index: int = 0) -> str:
        """The address of a task. Raises :class:`ClusterError` for an unknown task."""
        tasks = self._of(job)
        if index not in tasks:
            raise ClusterError(
                f"there is no task {index!r} in job {job!r}: its tasks are "
                f"{', '.join(map(str, tasks))}."
            )
        return tasks[index]

    def job_tasks(self, job: str) -> list[str | None]:
        """Addresses of a job by index; ``None`` where a sparse job has no task."""
        tasks = self._of(job)
        return [tasks.get(index) for index in range(max(tasks) + 1)]

    def address(self, task: Task) -> str:
        """Where this task is; as :meth:`task_address`."""
        return self.task_address(task.job, task.index)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """The jobs as they may be given again: lists, and mappings where indices are missing."""
        return {
            job: [address for _, address in tasks] if _is_dense(tasks) else dict(tasks)
            for job, tasks in self._jobs
        }

    def with_task(self, task: Task, address: str) -> ClusterSpec:
        """The cluster with one more task, or with another address for one that it has."""
        jobs = {job: dict(tasks) for job, tasks in self._jobs}
        jobs.setdefault(task.job, {})[task.index] = address
        return ClusterSpec(jobs)

    def without_task(self, task: Task) -> ClusterSpec:
        """The cluster with one task less; raises :class:`ClusterError` if it is not there."""
        self.address(task)
        jobs = {job: dict(tasks) for job, tasks in self._jobs}
        del jobs[task.job][task.index]
        return ClusterSpec({job: tasks for job, tasks in jobs.items() if tasks})

    def to_json(self) -> str:
        """The cluster as a text, for an environment variable.

        >>> ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}).to_json()
        '{"worker": ["a:1"], "ps": ["b:1"]}'
        """
        return json.dumps(self.as_dict())

    @classmethod
    def from_json(cls, text: str) -> ClusterSpec:
        """Read what :meth:`to_json` wrote. Raises :class:`ClusterError` for any other text."""
        try:
            return cls(json.loads(text))
        except json.JSONDecodeError as error:
            raise ClusterError(f"the cluster is not valid JSON ({error}): {text!r}.") from error

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _of(self, job: str) -> dict[int, str]:
        tasks = dict(self._jobs).get(job)
        if tasks is None:
            raise ClusterError(
                f"there is no job {job!r} in this cluster: it has {', '.join(self.jobs)}."
            )
        return dict(tasks)


# Reading what was given, and the checks, each returning the faults that it found


def _entries(jobs: Any) -> dict[str, list[tuple[Any, Any]]]:
    if not isinstance(jobs, Mapping):
        raise ClusterError(
            "a cluster is a mapping from job to addresses, such as "
            f"{{'ps': ['host:8888'], 'worker': ['host:8889']}}; received {jobs!r}."
        )
    return {job: _tasks_of(job, tasks) for job, tasks in jobs.items()}


def _tasks_of(job: Any, tasks: Any) -> list[tuple[Any, Any]]:
    if isinstance(tasks, Mapping):
        # JSON has texts for keys only, so "1" is read as 1.
        pairs = [(_whole(index), address) for index, address in tasks.items()]
        return sorted(pairs, key=lambda pair: (not _is_index(pair[0]), str(pair[0]).zfill(20)))
    if isinstance(tasks, Iterable) and not isinstance(tasks, str | bytes):
        return list(enumerate(tasks))
    raise ClusterError(
        f"job {job!r} is a list of addresses, or a mapping from index to address; "
        f"received {tasks!r}."
    )


def _whole(index: Any) -> Any:
    return int(index) if isinstance(index, str) and index.isdecimal() else index


def _is_index(index: Any) -> bool:
    return isinstance(index, int) and not isinstance(index, bool) and index >= 0


def _is_dense(tasks: Iterable[tuple[int, str]]) -> bool:
    return all(place == index for place, (index, _) in enumerate(tasks))


def _faults(entries: Mapping[Any, Sequence[tuple[Any, Any]]]) -> list[str]:
    if not entries:
        return ["the cluster is empty: it needs at least one worker and one ps."]
    faults = [_unknown_job(job) for job in entries if job not in JOBS]
    for job in ("worker", "ps"):
        if not entries.get(job):
            faults.append(f"there must be at least one {job}, and the cluster has none.")
    faults += [
        f"job {job!r} has no tasks: leave it out, or give it addresses."
        for job in ("chief", "evaluator")
        if job in entries and not entries[job]
    ]
    if len(entries.get("chief", ())) > 1:
        chiefs = ", ".join(str(address) for _, address in entries["chief"])
        faults.append(f"there must be at most one chief, and the cluster has several: {chiefs}.")
    for job, tasks in entries.items():
        faults += [fault for index, address in tasks for fault in _task_faults(job, index, address)]
    return faults + _twice(entries)


def _task_faults(job: Any, index: Any, address: Any) -> list[str]:
    faults = []
    if not _is_index(index):
        faults.append(f"index {index!r} of job {job!r}: indices must be whole numbers, at least 0.")
    if not isinstance(address, str) or not _is_address(address):
        faults.append(
            f"{job}:{index} has address {address!r}. Expected {ADDRESS_FORM}, or 'ipc://path'."
        )
    return faults


def _is_address(address: str) -> bool:
    if address.startswith("ipc://"):
        return len(address) > len("ipc://")
    return split_address(address.removeprefix("tcp://")) is not None


def _twice(entries: Mapping[Any, Sequence[tuple[Any, Any]]]) -> list[str]:
    named = [(f"{job}:{i}", str(a)) for job, tasks in entries.items() for i, a in tasks]
    counts = Counter(address for _, address in named)
    return [
        f"address {address!r} is that of {' and '.join(t for t, a in named if a == address)}: "
        "each task needs one of its own."
        for address, count in counts.items()
        if count > 1
    ]


def _unknown_job(job: Any) -> str:
    return f"unknown job {job!r}: the jobs of a cluster are {', '.join(JOBS)}."
