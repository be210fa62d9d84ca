"""The place in a group that the variables of each starter describe."""

from __future__ import annotations

import json

import pytest

import meshwright as mw
from meshwright import ClusterError, Membership
from meshwright.launch.membership import membership

OWN = {
    "MESHWRIGHT_RANK": "1",
    "MESHWRIGHT_PROCESSES": "4",
    "MESHWRIGHT_COORDINATOR": "n01:8476",
}
KUBEFLOW = {
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "train-node-0-0.train:6666",
}
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
WORKERS = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}
TPU_POD = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}


def tf_config(task: object, **jobs: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": task})}


ORTE = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
HERE = {"MESHWRIGHT_COORDINATOR": "n09:7000"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (OWN, Membership(1, 4, "n01:8476", "Meshwright")),
        ({**OWN, **SLURM, **TORCHRUN}, Membership(1, 4, "n01:8476", "Meshwright")),
        (KUBEFLOW, Membership(1, 2, "train-node-0-0.train:6666", "Kubeflow")),
        (
            {**KUBEFLOW, "JAX_COORDINATOR_ADDRESS": "train-0.train"},
            Membership(1, 2, "train-0.train:8476", "Kubeflow"),
        ),
        (TORCHRUN, Membership(3, 4, "n01:29500", "torchrun", 1)),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, Membership(3, 4, "n01:29501", "torchrun", 1)),
        ({**OPEN_MPI, **ORTE}, Membership(2, 4, "10.96.0.1:63808", "Open MPI", 0)),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            Membership(2, 4, "127.0.0.1:8476", "Open MPI", 0),
        ),
        ({**OPEN_MPI, **HERE}, Membership(2, 4, "n09:7000", "Open MPI", 0)),
        (HYDRA, Membership(1, 2, "127.0.0.1:8476", "hydra", 1)),
        (
            {**SLURM, **HYDRA, "MPI_LOCALNRANKS": "1"},  # srun --mpi=pmi2, or mpiexec in a job
            Membership(1, 2, "n01:61474", "hydra", 1),
        ),
        (SLURM, Membership(2, 3, "n01:61474", "Slurm", 0)),
        (TPU_POD, Membership(1, 2, "t0:8476", "TPU pod", 0)),
        (
            tf_config({"type": "worker", "index": 1}, **WORKERS),
            Membership(2, 3, "a:2222", "TF_CONFIG"),
        ),
        (tf_config({"type": "chief"}, **WORKERS), Membership(0, 3, "a:2222", "TF_CONFIG")),
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # an interactive shell
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        ({"TPU_WORKER_ID": "0"}, None),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        ({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # no srun
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "a:1"}, Membership(2, 3, "n01:61474", "Slurm", 0)),
        (HERE, None),
        (tf_config({"type": "worker", "index": 0}, worker=["a:1"], ps=["b:1"]), None),
    ],
)
def test_every_starter_is_understood(variables, expected):
    assert membership(variables) == expected
    if expected is not None:
        again = membership(expected.variables())
        assert again == Membership(
            expected.rank,
            expected.processes,
            expected.coordinator,
            "Meshwright",
            expected.local_rank,
        )


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            without(OWN, "MESHWRIGHT_COORDINATOR", "MESHWRIGHT_PROCESSES"),
            r"only half .* MESHWRIGHT_RANK=1, but not MESHWRIGHT_PROCESSES, MESHWRIGHT_COORDINATOR",
        ),
        (without(KUBEFLOW, "JAX_PROCESS_ID"), "but not JAX_PROCESS_ID"),
        (without(KUBEFLOW, "JAX_COORDINATOR_ADDRESS"), "but not JAX_COORDINATOR_ADDRESS"),
        (without(TORCHRUN, "WORLD_SIZE", "MASTER_PORT"), "but not WORLD_SIZE, MASTER_PORT"),
        (without(TORCHRUN, "RANK"), "but not RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but not RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "but not RANK, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_PORT": "29500"}, "but not RANK, WORLD_SIZE, MASTER_ADDR"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "but not JAX_PROCESS_ID, JAX_NUM_PROCESSES"),
        ({"TPU_WORKER_ID": "1"}, "but not TPU_WORKER_HOSTNAMES"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "but not OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI, r"Open MPI says .* but not where rank 0 is: set MESHWRIGHT_COORDINATOR"),
        (without(HYDRA, "PMI_SIZE"), "but not PMI_SIZE"),
        (without(HYDRA, "MPI_LOCALNRANKS"), "hydra says which rank"),
        (without(SLURM, "SLURM_STEP_NODELIST"), "not set: SLURM_STEP_NODELIST"),
        (without(TPU_POD, "TPU_WORKER_ID"), "but not TPU_WORKER_ID"),
        (tf_config(None, **WORKERS), 'TF_CONFIG has no "task"'),
        (tf_config({"type": "worker", "index": 7}, **WORKERS), "worker:7 is not among its workers"),
        ({**OWN, "MESHWRIGHT_RANK": "4"}, r"Meshwright: rank must be from 0 to 3; received 4"),
        ({**OWN, "MESHWRIGHT_RANK": "x"}, r"MESHWRIGHT_RANK must be a whole number; received 'x'"),
        ({**OWN, "MESHWRIGHT_COORDINATOR": "n01"}, r"coordinator must be 'host:port'"),
    ],
)
def test_half_an_environment_is_an_error_that_names_the_rest(variables, says):
    with pytest.raises(ClusterError, match=says):
        membership(variables)


def test_joining_too_late_or_by_half_is_an_error():
    with pytest.raises(mw.TopologyError, match=r"expected all three, or none"):
        mw.join(rank=0)
    mw.create_mesh({"batch": 8})
    with pytest.raises(mw.TopologyError, match=r"join\(\) comes too late"):
        mw.join(0, 2, "127.0.0.1:1")
