"""``meshwright launch --write``: a job for a scheduler, as an sbatch script or YAML.

In each of them the scheduler starts the processes, ``import meshwright`` joins them, SIGTERM has
them save and exit with 75, and that exit code alone means "run me again, as often as it takes".
Any other failure is retried ``max_restarts`` times.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ClusterError
from ..topology import virtual_device_variables
from .join import JOIN
from .membership import DEFAULT_PORT
from .signals import PREEMPTED
from .yaml import to_yaml

_FAILED = PREEMPTED + 1
_DNS_LABEL = r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?"  # names of pods add to it, and have 63 at most
_GPU = "nvidia.com/gpu"
_PREEMPTION = {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts"}


@dataclass(frozen=True)
class Job:
    """A program on ``nodes`` times ``processes`` processes.

    ``gpus`` are those of one node. ``grace_s`` is how long the processes have between SIGTERM and
    SIGKILL. ``image`` is needed for Kubernetes. Raises :class:`~meshwright.errors.ClusterError`
    that lists every invalid value.

    >>> print(Job(("train.py", "--epochs", "3"), nodes=2, name="digits").write("slurm"))
    #!/bin/bash
    #SBATCH --job-name=digits
    ...
    """

    program: tuple[str, ...]
    nodes: int = 1
    processes: int = 1
    devices: int | None = None
    gpus: int = 0
    name: str = "train"
    image: str = ""
    max_restarts: int = 3
    grace_s: int = 120

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be {least} or more; received {value}."
            for name, value, least in (
                ("nodes", self.nodes, 1),
                ("processes", self.processes, 1),
                ("devices", 1 if self.devices is None else self.devices, 1),
                ("gpus", self.gpus, 0),
                ("max_restarts", self.max_restarts, 0),
                ("grace_s", self.grace_s, 1),
            )
            if value < least
        ]
        if not re.fullmatch(_DNS_LABEL, self.name):
            faults.append(
                "name must be small letters, digits and '-', 42 at most, a letter first; received "
                f"{self.name!r}."
            )
        if self.gpus % max(1, self.processes):
            faults.append(
                f"{self.gpus} GPUs of a node cannot be shared out evenly among {self.processes} "
                "processes."
            )
        if not self.program:
            faults.append("there must be a program to run.")
        if faults:
            raise ClusterError("\n".join(faults))

    @property
    def total(self) -> int:
        """The number of processes on all nodes."""
        return self.nodes * self.processes

    def write(self, kind: str) -> str:
        """The text of a ``kind`` of job: ``slurm``, ``jobset``, ``trainjob`` or ``ray``."""
        if kind not in KINDS:
            raise ClusterError(f"unknown kind of job {kind!r}; there are {', '.join(KINDS)}.")
        if kind != "slurm" and not self.image:
            raise ClusterError(f"{kind}: pods need an image with Meshwright (--image).")
        return KINDS[kind](self)

    def variables(self) -> dict[str, str]:
        """What every process gets in its environment, besides what its scheduler sets."""
        devices = {} if self.devices is None else virtual_device_variables(self.devices, {})
        return {JOIN: "1", **devices}


def slurm(job: Job) -> str:
    """A script for ``sbatch``.

    SIGTERM comes ``grace_s`` before the time limit, and at preemption. The job is requeued after
    exit code 75, and by Slurm itself when a node fails. After another failure the processes are
    started again in the same allocation. ``srun`` exits with the highest code of all tasks, so a
    task that fails with a lower one than 75 ends with 76: else it would count as preempted.
    """
    head = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.processes,
        **({"gpus-per-task": job.gpus // job.processes} if job.gpus else {}),
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
        "requeue": "",
        "signal": f"TERM@{job.grace_s}",
    }
    options = "\n".join(f"#SBATCH --{k}" + (f"={v}" if v != "" else "") for k, v in head.items())
    exports = "\n".join(f"export {k}={shlex.quote(v)}" for k, v in job.variables().items())
    task = f'trap : TERM; "$@"; code=$?; [ $code -gt 0 -a $code -lt {PREEMPTED} ] && code={_FAILED}'
    command = shlex.join(
        ["bash", "-c", f"{task}; exit $code", "task", sys.executable, *job.program]
    )
    return f"""#!/bin/bash
{options}

{exports}

for attempt in $(seq 0 {job.max_restarts}); do
  # A process that fails is named by the others, which then end by themselves. The code of srun is
  # the highest of all tasks: {PREEMPTED} if they have saved, and higher if one of them has failed.
  srun --kill-on-bad-exit=0 {command}
  code=$?
  if [ $code -eq 0 ]; then exit 0; fi
  if [ $code -eq {PREEMPTED} ]; then  # saved: the same command goes on from there
    scontrol requeue "$SLURM_JOB_ID"
    exit {PREEMPTED}
  fi
done
exit $code
"""


def jobset(job: Job) -> str:
    """A JobSet (``jobset.x-k8s.io/v1alpha2``) with one pod for each process."""
    first = f"{job.name}-worker-0-0.{job.name}"
    place = {
        "JAX_NUM_PROCESSES": str(job.total),
        "JAX_COORDINATOR_ADDRESS": f"{first}:{DEFAULT_PORT}",
    }
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    env = [*_env({**job.variables(), **place})]
    env.append({"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": index}})
    container = {**_container(job, "worker"), "command": ["python", *job.program], "env": env}
    return _document(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        {"name": job.name},
        {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _failure_policy(job),
            "replicatedJobs": [
                {
                    "name": "worker",
                    "replicas": 1,
                    "template": {"spec": _indexed_job(job, container)},
                }
            ],
        },
    )


def trainjob(job: Job) -> str:
    """A TrainJob of Kubeflow Trainer (``v1alpha1``) and its runtime, one pod for each process."""
    group = "trainer.kubeflow.org"
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    container = {**_container(job, "node"), "env": _env(job.variables())}
    runtime = _document(
        f"{group}/v1alpha1",
        "TrainingRuntime",
        {"name": job.name, "labels": {"trainer.kubeflow.org/framework": "jax"}},
        {
            "mlPolicy": {"numNodes": job.total, "jax": {}},
            "template": {
                "spec": {
                    "failurePolicy": _failure_policy(job),
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": step},
                                "spec": _pods_of(job, container),
                            },
                        }
                    ],
                }
            },
        },
    )
    train = _document(
        f"{group}/v1alpha1",
        "TrainJob",
        {"name": job.name},
        {
            "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "image": job.image,
                "command": ["python", *job.program],
                "numNodes": job.total,
            },
        },
    )
    return f"{runtime}---\n{train}"


def ray(job: Job) -> str:
    """A RayJob (``ray.io/v1``): one worker pod for each node, and the processes as actors.

    Ray passes no SIGTERM on to actors, so a preempted node counts as lost: the group starts again
    from its newest checkpoint.
    """
    launch = ["meshwright", "launch", "--ray", "--processes", str(job.total)]
    launch += ["--max-restarts", str(job.max_restarts)]
    if job.devices is not None:
        launch += ["--devices", str(job.devices)]
    if job.gpus:
        launch += ["--gpus", str(job.gpus // job.processes)]
    head = {"name": "ray-head", "image": job.image}
    return _document(
        "ray.io/v1",
        "RayJob",
        {"name": job.name},
        {
            "entrypoint": shlex.join([*launch, *job.program]),
            "backoffLimit": job.max_restarts,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},  # none of the processes
                    "template": {"spec": {"containers": [head]}},
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "worker",
                        "replicas": job.nodes,
                        "minReplicas": job.nodes,
                        "maxReplicas": job.nodes,
                        "rayStartParams": {"num-cpus": str(job.processes)},
                        "template": {
                            "spec": {
                                "terminationGracePeriodSeconds": job.grace_s,
                                "containers": [
                                    {
                                        "name": "ray-worker",
                                        "image": job.image,
                                        **_gpus(job.gpus),
                                    }
                                ],
                            }
                        },
                    }
                ],
            },
        },
    )


KINDS: Mapping[str, Callable[[Job], str]] = {
    "slurm": slurm,
    "jobset": jobset,
    "trainjob": trainjob,
    "ray": ray,
}


# Parts


def _document(version: str, kind: str, metadata: dict[str, Any], spec: dict[str, Any]) -> str:
    return to_yaml({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})


def _env(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _container(job: Job, name: str) -> dict[str, Any]:
    return {"name": name, "image": job.image, **_gpus(job.gpus // job.processes)}


def _gpus(count: int) -> dict[str, Any]:
    return {"resources": {"limits": {_GPU: count}}} if count else {}


def _failure_policy(job: Job) -> dict[str, Any]:
    rule = {**_PREEMPTION, "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": job.max_restarts, "rules": [rule]}


def _pods_of(job: Job, container: Mapping[str, Any]) -> dict[str, Any]:
    """A Job whose pods are never restarted one by one, and which says so if it was preempted."""
    exit_code = {"containerName": container["name"], "operator": "In", "values": [PREEMPTED]}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": exit_code},
                {"action": "FailJob", "onPodConditions": disrupted},
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": job.grace_s,
                "containers": [container],
            }
        },
    }


def _indexed_job(job: Job, container: Mapping[str, Any]) -> dict[str, Any]:
    shape = {"completionMode": "Indexed", "parallelism": job.total, "completions": job.total}
    return {**shape, **_pods_of(job, container)}
