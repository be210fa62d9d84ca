"""Which process of a synchronous group this one is: environment variables in, a value out.

Every starter of processes has variables of its own. They are read here and nowhere else; nothing
is asked over the network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import ClusterError
from . import slurm, tf_config
from .addresses import ADDRESS_FORM, join_address, split_address
from .variables import Environment

RANK, PROCESSES = "MESHWRIGHT_RANK", "MESHWRIGHT_PROCESSES"
LOCAL_RANK, COORDINATOR = "MESHWRIGHT_LOCAL_RANK", "MESHWRIGHT_COORDINATOR"
DEFAULT_PORT = 8476
_HIGHEST_PORTS = 61440  # and 4,096 above: where JAX puts the coordinators of jobs, too


@dataclass(frozen=True)
class Membership:
    """One process of a group: its rank, how many there are, and where rank 0 listens.

    ``rank`` counts from 0 to ``processes`` - 1, ``local_rank`` those on its host. ``coordinator``
    is the ``host:port`` at which JAX's processes of the group meet; ``source`` says who started
    them. Raises :class:`~meshwright.errors.ClusterError` for a rank that the group does not have,
    and for an address without a port.

    >>> Membership(rank=1, processes=4, coordinator="n01:8476", source="by hand")
    Membership(rank=1, processes=4, coordinator='n01:8476', source='by hand', local_rank=None)
    """

    rank: int
    processes: int
    coordinator: str
    source: str = "arguments"
    local_rank: int | None = None  # counted on its host; None: unknown

    def __post_init__(self) -> None:
        faults = []
        if self.processes < 1:
            faults.append(f"the number of processes must be 1 or more; received {self.processes}.")
        elif not 0 <= self.rank < self.processes:
            faults.append(f"rank must be from 0 to {self.processes - 1}; received {self.rank}.")
        if split_address(self.coordinator) is None:
            faults.append(f"coordinator must be {ADDRESS_FORM}; received {self.coordinator!r}.")
        if faults:
            raise ClusterError(f"{self.source}: " + "\n".join(faults))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host, int(port)

    def variables(self) -> dict[str, str]:
        """The variables from which :func:`membership` makes this value again."""
        local = "" if self.local_rank is None else str(self.local_rank)
        return {
            RANK: str(self.rank),
            PROCESSES: str(self.processes),
            COORDINATOR: self.coordinator,
            LOCAL_RANK: local,
        }


def membership(environment: Environment | None = None) -> Membership | None:
    """The place in a group that the environment describes; ``None`` if it describes none.

    Looked for, in this order: Meshwright's variables, those of Kubeflow Trainer and JobSet, of
    torchrun, Open MPI, hydra (MPICH, Intel MPI), Slurm, TPU pods, and ``TF_CONFIG``. Raises
    :class:`~meshwright.errors.ClusterError` where some of a starter's variables are set and others
    are not, naming them.

    What is also set where a program runs alone describes no group: ``WORLD_SIZE=1``,
    ``LOCAL_RANK``, ``SLURM_PROCID`` outside of a step (``salloc``, ``sbatch`` without ``srun``),
    and ``TPU_WORKER_ID`` 0, or beside one name of a host.

    >>> membership({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"})
    Membership(rank=1, processes=2, coordinator='a:29500', source='torchrun', local_rank=None)
    """
    variables = os.environ if environment is None else environment
    for reader in _READERS:
        member = reader(variables)
        if member is not None:
            return member
    _check_no_half(variables)
    return None


# One reader for each starter: None where none of its variables are set

_KUBEFLOW = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TPU_POD = ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")


def _own(variables: Environment) -> Membership | None:
    names = (RANK, PROCESSES, COORDINATOR)
    if not any(variables.get(name) for name in (RANK, PROCESSES)):
        return None  # the address alone completes what others set
    _need_all(variables, names, "Meshwright's variables")
    return _read(variables, "Meshwright", RANK, PROCESSES, variables[COORDINATOR], LOCAL_RANK)


def _kubeflow(variables: Environment) -> Membership | None:
    rank, processes, address = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"
    if not any(variables.get(name) for name in (rank, processes)):
        return None  # others may say the rest: Slurm, say
    _need_all(variables, _KUBEFLOW, "Kubeflow Trainer's JAX runtime")
    return _read(variables, "Kubeflow", rank, processes, _with_port(variables[address]))


def _torchrun(variables: Environment) -> Membership | None:
    rank, processes = "RANK", "WORLD_SIZE"
    if not (variables.get(rank) or variables.get("MASTER_ADDR")):
        return None
    _need_all(variables, _TORCHRUN, "torchrun's environment")
    port = _number(variables, "MASTER_PORT")
    if variables.get("TORCHELASTIC_RUN_ID"):
        port += 1  # torchrun itself listens at the port that it names
    address = join_address(variables["MASTER_ADDR"], port)
    return _read(variables, "torchrun", rank, processes, address, "LOCAL_RANK")


def _open_mpi(variables: Environment) -> Membership | None:
    rank, processes = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    local = "OMPI_COMM_WORLD_LOCAL_RANK"
    if not any(variables.get(name) for name in (rank, processes)):
        return None
    _need_all(variables, (rank, processes), "Open MPI's environment")
    one_host = variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == variables[processes]
    address = (
        variables.get(COORDINATOR)
        or _of_mpirun(variables.get("OMPI_MCA_orte_hnp_uri", ""))
        or _of_one_host(one_host)
        or _of_slurm(variables)
    )
    return _read(
        variables, "Open MPI", rank, processes, _checked_address(address, "Open MPI"), local
    )


def _hydra(variables: Environment) -> Membership | None:
    rank, processes, local = "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"
    if not any(variables.get(name) for name in (rank, processes)):
        return None
    _need_all(variables, (rank, processes), "hydra's environment (MPICH, Intel MPI)")
    one_host = variables.get("MPI_LOCALNRANKS") == variables[processes]
    address = variables.get(COORDINATOR) or _of_one_host(one_host) or _of_slurm(variables)
    return _read(variables, "hydra", rank, processes, _checked_address(address, "hydra"), local)


def _slurm(variables: Environment) -> Membership | None:
    if not slurm.in_step(variables):
        return None
    placed = slurm.places(variables)
    address = variables.get(COORDINATOR) or _of_slurm(variables) or ""
    local = variables.get("SLURM_LOCALID", "")
    rank = int(variables["SLURM_PROCID"])
    return Membership(
        rank, len(placed), address, "Slurm", int(local) if local.isdecimal() else placed[rank][1]
    )


def _tpu_pod(variables: Environment) -> Membership | None:
    hosts = [h for h in variables.get("TPU_WORKER_HOSTNAMES", "").split(",") if h]
    if len(hosts) < 2:
        return None
    _need_all(variables, _TPU_POD, "a TPU pod")
    rank = _number(variables, "TPU_WORKER_ID")
    return Membership(rank, len(hosts), _with_port(hosts[0]), "TPU pod", 0)


def _tf_config(variables: Environment) -> Membership | None:
    text = variables.get("TF_CONFIG", "")
    if not text:
        return None
    config = tf_config.read_config(text)
    jobs = tf_config.jobs_of(config)
    if jobs.get("ps"):
        return None  # a parameter-server cluster
    task = tf_config.task_of(config, jobs)
    if task is None:
        raise ClusterError(
            'TF_CONFIG has no "task", which says which of its workers this process is: '
            '{"type": "worker", "index": 0}.'
        )
    addresses = {
        (job, index): address
        for job in ("chief", "worker")
        for index, address in _indexed(jobs.get(job, ()))
    }
    if task not in addresses:
        names = ", ".join(f"{job}:{index}" for job, index in addresses)
        raise ClusterError(f"TF_CONFIG: {task[0]}:{task[1]} is not among its workers: {names}.")
    rank = list(addresses).index(task)
    first = next(iter(addresses.values()))
    return Membership(rank, len(addresses), _with_port(first), "TF_CONFIG")


_READERS: tuple[Callable[[Environment], Membership | None], ...] = (
    _own,
    _kubeflow,
    _torchrun,
    _open_mpi,
    _hydra,
    _slurm,
    _tpu_pod,
    _tf_config,
)


# Parts


def _check_no_half(variables: Environment) -> None:
    """Raise :class:`ClusterError` for single variables that only a process of a group has.

    Without the others each process would train alone.
    """
    processes = variables.get("WORLD_SIZE")
    if processes != "1" and (processes or variables.get("MASTER_PORT")):
        _need_all(variables, _TORCHRUN, "torchrun's environment")
    if variables.get("JAX_COORDINATOR_ADDRESS"):
        _need_all(variables, _KUBEFLOW, "Kubeflow Trainer's JAX runtime")
    if variables.get("TPU_WORKER_ID", "0") != "0" and not variables.get("TPU_WORKER_HOSTNAMES"):
        _need_all(variables, _TPU_POD, "a TPU pod")


def _read(
    variables: Environment, source: str, rank: str, processes: str, address: str, local: str = ""
) -> Membership:
    return Membership(
        _number(variables, rank),
        _number(variables, processes),
        address,
        source,
        _number(variables, local) if variables.get(local) else None,
    )


def _need_all(variables: Environment, names: tuple[str, ...], where: str) -> None:
    missing = [name for name in names if not variables.get(name)]
    if missing:
        present = [f"{name}={variables[name]}" for name in names if name not in missing]
        raise ClusterError(
            f"{where} describes only half of this process: {', '.join(present)}, but not "
            f"{', '.join(missing)}. Set {', '.join(missing)} too, or unset the others."
        )


def _number(variables: Environment, name: str) -> int:
    text = variables[name]
    if not text.isdecimal():
        raise ClusterError(f"{name} must be a whole number; received {text!r}.")
    return int(text)


def _with_port(address: str) -> str:
    """The address with a port; one of IPv6 without brackets says too little, and is refused."""
    has_port = ":" in address.rpartition("]")[2]
    return address if has_port else f"{address}:{DEFAULT_PORT}"


def _of_mpirun(uri: str) -> str | None:
    """From ``1531576320.0;tcp://10.96.0.1,10.148.0.1:34911``: mpirun runs where rank 0 does."""
    match = re.match(r"(\d+)\.\d+;tcp://([^,:]+)", uri)
    return match and f"{match[2]}:{_port_of_job(int(match[1]) >> 12)}"


def _of_one_host(is_one: bool) -> str | None:
    return f"127.0.0.1:{DEFAULT_PORT}" if is_one else None


def _of_slurm(variables: Environment) -> str | None:
    nodes, job = variables.get("SLURM_STEP_NODELIST", ""), variables.get("SLURM_JOB_ID", "")
    if not nodes:
        return None
    port = _port_of_job(int(job)) if job.isdecimal() else DEFAULT_PORT
    return f"{slurm.expand_nodes(nodes)[0]}:{port}"


def _port_of_job(job: int) -> int:
    """A port of its own for each of many jobs; even, because the next one is used as well."""
    return _HIGHEST_PORTS + job * 2 % 4096


def _checked_address(address: str | None, starter: str) -> str:
    if address:
        return address
    raise ClusterError(
        f"{starter} says which rank this process is, but not where rank 0 is: set "
        f"{COORDINATOR}=host:port for all of them (mpirun -x {COORDINATOR}=..., or -genv)."
    )


def _indexed(tasks: object) -> list[tuple[int, str]]:
    if isinstance(tasks, Mapping):
        return sorted((int(index), str(address)) for index, address in tasks.items())
    return list(enumerate(map(str, tasks))) if isinstance(tasks, list | tuple) else []
