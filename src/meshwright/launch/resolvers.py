"""Resolvers: who says which tasks a cluster has, and which of them this process is.

Each is a value made from the environment once: ``TF_CONFIG`` (as TensorFlow reads it), Slurm's
variables, what Kubernetes' downward API can tell a pod, or Meshwright's own variables.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol, runtime_checkable

from ..errors import ClusterError
from . import slurm, tf_config
from .spec import ClusterSpec, Job, Task
from .variables import Environment, need

DEFAULT_PORT = 8888


@runtime_checkable
class ClusterResolver(Protocol):
    """Whatever knows the tasks of a cluster, and which of them this process is."""

    def cluster_spec(self) -> ClusterSpec:
        """The tasks and where they are."""
        ...

    def task(self) -> Task | None:
        """The task of this process; ``None`` if it is unknown."""
        ...


@dataclass(frozen=True, init=False)
class SimpleResolver:
    """A cluster that is written down, and the task of this process.

    ``spec`` is a :class:`ClusterSpec` or its mapping, ``task`` such as ``"worker:1"``. Raises
    :class:`~meshwright.errors.ClusterError` for a task that the cluster does not have. An evaluator
    need not be listed, because no task connects to it.

    >>> SimpleResolver({"worker": ["b:1"], "ps": ["a:1"]}, "worker:0").task()
    Task(job='worker', index=0)
    """

    spec: ClusterSpec
    own: Task | None

    def __init__(
        self, spec: ClusterSpec | Mapping[str, Job], task: Task | str | None = None
    ) -> None:
        checked = spec if isinstance(spec, ClusterSpec) else ClusterSpec(spec)
        own = Task.parse(task) if isinstance(task, str) else task
        if own is not None:
            _check_own(checked, own)
        object.__setattr__(self, "spec", checked)
        object.__setattr__(self, "own", own)

    def cluster_spec(self) -> ClusterSpec:
        """The tasks and where they are."""
        return self.spec

    def task(self) -> Task | None:
        """The task of this process, if it was given."""
        return self.own

    def __enter__(self) -> NoReturn:
        """A resolver only describes a cluster, so there is nothing to leave."""
        raise not_entered(f"{type(self).__name__} describes a cluster")

    def __exit__(self, *_: object) -> None:
        """Never called."""


class EnvironmentResolver(SimpleResolver):
    """``MESHWRIGHT_CLUSTER`` (the cluster in JSON) and ``MESHWRIGHT_TASK`` (``"worker:1"``).

    >>> variables = {"MESHWRIGHT_CLUSTER": '{"worker": ["b:1"], "ps": ["a:1"]}'}
    >>> EnvironmentResolver({**variables, "MESHWRIGHT_TASK": "ps:0"}).task()
    Task(job='ps', index=0)
    """

    def __init__(self, environment: Environment | None = None) -> None:
        variables = os.environ if environment is None else environment
        text = variables.get("MESHWRIGHT_CLUSTER", "")
        if not text:
            raise ClusterError(
                "MESHWRIGHT_CLUSTER is not set. It is the cluster in JSON, such as "
                '{"chief": ["a:8888"], "ps": ["b:8888"], "worker": ["c:8888"]}.'
            )
        super().__init__(ClusterSpec.from_json(text), variables.get("MESHWRIGHT_TASK") or None)


class TFConfigResolver(SimpleResolver):
    """``TF_CONFIG``, as ``TFConfigClusterResolver`` of TensorFlow reads it.

    ``environment`` stands in for ``os.environ``. A job or type ``master`` is the chief; indices may
    be texts; ``rpc_layer`` and other entries are not read. Raises
    :class:`~meshwright.errors.ClusterError` where it is not set or not right.

    >>> cluster = '"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}'
    >>> task = '"task": {"type": "worker", "index": 1}'
    >>> TFConfigResolver({"TF_CONFIG": "{" + cluster + ", " + task + "}"}).task()
    Task(job='worker', index=1)
    """

    def __init__(self, environment: Environment | None = None) -> None:
        variables = os.environ if environment is None else environment
        config = tf_config.read_config(variables.get("TF_CONFIG", ""))
        jobs = tf_config.jobs_of(config)
        task = tf_config.task_of(config, jobs)
        with _about("TF_CONFIG"):
            super().__init__(jobs, None if task is None else Task(*task))


class SlurmResolver(SimpleResolver):
    """The tasks of a Slurm step (``srun``), by rank: the first of ``jobs`` gets the first ranks.

    ``jobs`` says how many tasks each job has, as a mapping or as in ``MESHWRIGHT_JOBS``, which is
    read where it is not given. The tasks of one host listen at ``port_base``, ``port_base + 1`` and
    so on. ``environment`` stands in for ``os.environ``. GPUs play no part: ``srun --gpus-per-task``
    shares them out. Raises :class:`~meshwright.errors.ClusterError` where counts do not agree.

    >>> step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3",
    ...         "SLURM_STEP_NODELIST": "n[01-02]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    >>> resolver = SlurmResolver({"ps": 1, "worker": 2}, environment=step)
    >>> resolver.cluster_spec().as_dict(), str(resolver.task())
    ({'worker': ['n01:8889', 'n02:8888'], 'ps': ['n01:8888']}, 'worker:0')
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | str | None = None,
        port_base: int | None = None,
        *,
        environment: Environment | None = None,
    ) -> None:
        variables = os.environ if environment is None else environment
        counts = _job_counts(jobs, variables)
        with _about("Slurm's step"):
            places = slurm.places(variables)
            port = _port(variables) if port_base is None else port_base
            addresses = [f"{host}:{port + local}" for host, local in places]
            ranks = slurm.first_ranks(counts, len(places))
            spec = ClusterSpec(
                {
                    job: [addresses[rank] for rank in range(first, first + counts[job])]
                    for job, first in ranks.items()
                }
            )
            rank = int(variables["SLURM_PROCID"])
            slurm.check_place(rank, places[rank], variables)
        job = max((job for job in ranks if ranks[job] <= rank), key=lambda job: ranks[job])
        super().__init__(spec, Task(job, rank - ranks[job]))


class KubernetesResolver(SimpleResolver):
    """The pods of StatefulSets ``<name>-<job>`` under one headless service; asks no API server.

    Read are ``MESHWRIGHT_JOB`` (the job of this pod), ``MESHWRIGHT_JOBS``
    (``"chief=1,ps=2,worker=4"``), ``MESHWRIGHT_SERVICE`` (the headless service), ``HOSTNAME``
    (the pod's name, ``<name>-<job>-<index>``), and ``MESHWRIGHT_PORT`` (8888 unless given), in
    ``environment``, or else in ``os.environ``.
    Raises :class:`~meshwright.errors.ClusterError`, naming all that is missing or wrong.

    >>> pod = {"MESHWRIGHT_JOB": "worker", "MESHWRIGHT_JOBS": "chief=1,ps=1,worker=2",
    ...        "MESHWRIGHT_SERVICE": "train", "HOSTNAME": "train-worker-1"}
    >>> resolver = KubernetesResolver(pod)
    >>> resolver.cluster_spec().task_address("ps", 0), str(resolver.task())
    ('train-ps-0.train:8888', 'worker:1')
    """

    def __init__(self, environment: Environment | None = None) -> None:
        variables = os.environ if environment is None else environment
        needs = ("MESHWRIGHT_JOB", "MESHWRIGHT_JOBS", "MESHWRIGHT_SERVICE", "HOSTNAME")
        need(variables, needs, "a pod of Kubernetes")
        job, service = variables["MESHWRIGHT_JOB"], variables["MESHWRIGHT_SERVICE"]
        match = re.fullmatch(rf"(.+)-{re.escape(job)}-(\d+)", variables["HOSTNAME"])
        if match is None:
            raise ClusterError(
                f"HOSTNAME={variables['HOSTNAME']!r} does not end with '-{job}-<index>', as the "
                f"pods of a StatefulSet named '<name>-{job}' do; MESHWRIGHT_JOB is {job!r}."
            )
        counts, port = _job_counts(None, variables), _port(variables)
        with _about("the pods"):
            spec = ClusterSpec(
                {
                    name: [f"{match[1]}-{name}-{i}.{service}:{port}" for i in range(count)]
                    for name, count in counts.items()
                }
            )
            super().__init__(spec, Task(job, int(match[2])))


def resolve(environment: Environment | None = None) -> ClusterResolver:
    """The resolver for this environment: Meshwright's variables, TF_CONFIG, Kubernetes, Slurm.

    Raises :class:`~meshwright.errors.ClusterError` where none applies, and lists which variables
    it looked for.
    """
    variables = os.environ if environment is None else environment
    if variables.get("MESHWRIGHT_CLUSTER"):
        return EnvironmentResolver(variables)
    if variables.get("TF_CONFIG"):
        return TFConfigResolver(variables)
    if variables.get("MESHWRIGHT_JOB") or variables.get("MESHWRIGHT_SERVICE"):
        return KubernetesResolver(variables)
    if slurm.in_step(variables):
        return SlurmResolver(environment=variables)
    raise ClusterError(
        "the environment describes no cluster. Looked for: MESHWRIGHT_CLUSTER and "
        "MESHWRIGHT_TASK; TF_CONFIG; MESHWRIGHT_JOB, MESHWRIGHT_JOBS and MESHWRIGHT_SERVICE (a "
        "pod of Kubernetes); SLURM_PROCID with SLURM_STEP_NUM_TASKS above 1, and MESHWRIGHT_JOBS "
        "(a step of Slurm). `meshwright launch` and LocalCluster start one on this machine."
    )


def tells_of_cluster(environment: Environment | None = None) -> bool:
    """Whether any variable is set that :func:`resolve` goes by."""
    variables = os.environ if environment is None else environment
    names = ("CLUSTER", "TASK", "JOB", "JOBS", "SERVICE")
    named = any(variables.get(f"MESHWRIGHT_{name}") for name in names)
    return named or bool(variables.get("TF_CONFIG")) or slurm.in_step(variables)


def not_entered(what: str) -> ClusterError:
    """The error of ``with`` around something that only describes where a program runs."""
    return ClusterError(
        f"{what}, and is not a context manager. Write: "
        "with mw.ParameterServer(mw.run_task()) as strategy: ..."
    )


# Parts


@contextlib.contextmanager
def _about(source: str) -> Iterator[None]:
    """Begin the message of every :class:`ClusterError` raised inside with its source."""
    try:
        yield
    except ClusterError as error:
        raise ClusterError(f"{source}: {error}") from error


def _check_own(spec: ClusterSpec, own: Task) -> None:
    if own in spec.tasks or own.job == "evaluator":
        return
    if own.job not in spec.jobs:
        raise ClusterError(f"{own} is not in the cluster, which has {', '.join(spec.jobs)}.")
    indices = ", ".join(map(str, spec.task_indices(own.job)))
    raise ClusterError(f"{own} is not in the cluster: the indices of its {own.job}s are {indices}.")


def _port(variables: Environment) -> int:
    text = variables.get("MESHWRIGHT_PORT") or str(DEFAULT_PORT)
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ClusterError(f"MESHWRIGHT_PORT must be a number from 1 to 65535; received {text!r}.")
    return int(text)


def _job_counts(jobs: Mapping[str, int] | str | None, variables: Environment) -> dict[str, int]:
    if jobs is None:
        jobs = variables.get("MESHWRIGHT_JOBS", "")
        if not jobs:
            raise ClusterError(
                "MESHWRIGHT_JOBS is not set. It says how many tasks each job has: "
                "'chief=1,ps=2,worker=4'."
            )
    counts = slurm.parse_jobs(jobs) if isinstance(jobs, str) else dict(jobs)
    wrong = [f"{job}={n!r}" for job, n in counts.items() if type(n) is not int or n < 0]
    if wrong:
        raise ClusterError(
            f"{', '.join(wrong)}: the number of tasks of a job must be a whole number, 0 or more."
        )
    return counts
