"""Resolvers against tables: TensorFlow's own examples, and environments with something wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import ClusterError
from meshwright.launch import (
    EnvironmentResolver,
    KubernetesResolver,
    SlurmResolver,
    Task,
    TFConfigResolver,
    resolve,
)
from meshwright.launch.resolvers import SimpleResolver, tells_of_cluster
from meshwright.launch.slurm import expand_nodes, parse_jobs, tasks_per_node

CLUSTER = {"worker": ["w:1", "w:2"], "ps": ["p:1"]}


def tf_config(cluster: object = CLUSTER, task: object = None, **more: object) -> dict[str, str]:
    config = {"cluster": cluster, **more} | ({} if task is None else {"task": task})
    return {"TF_CONFIG": json.dumps(config)}


TF_CONFIGS = {
    "worker 1 of 2": (tf_config(task={"type": "worker", "index": 1}), "worker:1"),
    "an index that is a text": (tf_config(task={"type": "worker", "index": "1"}), "worker:1"),
    "no task": (tf_config(), None),
    "an empty task": (tf_config(task={}), None),
    "one ps, no index": (tf_config(task={"type": "ps"}), "ps:0"),
    "a master": (
        tf_config({**CLUSTER, "master": ["m:1"]}, {"type": "master", "index": 0}),
        "chief:0",
    ),
    "an evaluator, not in the cluster": (
        tf_config(task={"type": "evaluator", "index": 0}),
        "evaluator:0",
    ),
    "other entries": (
        tf_config(task={"type": "ps", "index": 0, "trial": "1"}, rpc_layer="grpc", environment="x"),
        "ps:0",
    ),
    "a sparse cluster": (
        tf_config({"worker": {"1": "w:2"}, "ps": ["p:1"]}, {"type": "worker", "index": 1}),
        "worker:1",
    ),
}


@pytest.mark.parametrize(("variables", "task"), TF_CONFIGS.values(), ids=TF_CONFIGS)
def test_tf_config_is_read_as_tensorflow_reads_it(variables, task):
    resolver = TFConfigResolver(variables)
    own = resolver.task()
    assert (own if own is None else str(own)) == task
    assert resolver.cluster_spec().task_address("worker", 1) == "w:2"
    assert resolve(variables) == resolver


WRONG_TF_CONFIGS = {
    "absent": ({}, "TF_CONFIG is not set"),
    "no JSON": ({"TF_CONFIG": "{cluster"}, "TF_CONFIG is not valid JSON"),
    "no mapping": ({"TF_CONFIG": "[1]"}, "TF_CONFIG must be a JSON object"),
    "no cluster": ({"TF_CONFIG": "{}"}, "TF_CONFIG has no cluster in it: None"),
    "no ps": (tf_config({"worker": ["a:1"]}), "TF_CONFIG: there must be at least one ps"),
    "no type": (tf_config(task={"index": 0}), "task has no type"),
    "no index": (tf_config(task={"type": "worker"}), "more than one worker"),
    "an unknown type": (tf_config(task={"type": "foobar", "index": 0}), "unknown job 'foobar'"),
    "an index out of range": (
        tf_config(task={"type": "worker", "index": 2}),
        "worker:2 is not in the cluster: the indices of its workers are 0, 1",
    ),
    "an index that is no number": (
        tf_config(task={"type": "worker", "index": "one"}),
        "TF_CONFIG: index 'one' of a task",
    ),
    "chief and master": (
        tf_config({**CLUSTER, "chief": ["a:1"], "master": ["b:1"]}),
        "a chief and a master",
    ),
}


NODE_LISTS = {
    "n01": ["n01"],
    "n[01-02]": ["n01", "n02"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[08-10,12],gpu3": ["n08", "n09", "n10", "n12", "gpu3"],
    "a-b-[1-2]-ib,c": ["a-b-1-ib", "a-b-2-ib", "c"],
    "r[1-2]n[0-1]": ["r1n0", "r1n1", "r2n0", "r2n1"],
    "x,y": ["x", "y"],
}


@pytest.mark.parametrize(("text", "hosts"), NODE_LISTS.items(), ids=NODE_LISTS)
def test_slurms_node_lists_are_expanded(text, hosts):
    assert expand_nodes(text) == hosts


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), min_size=1, max_size=5))
def test_a_list_of_ranges_names_every_host_in_them_in_order(ranges):
    text = ",".join(f"{low:03d}-{low + more:03d}" for low, more in ranges)
    numbers = [low + step for low, more in ranges for step in range(more + 1)]
    assert expand_nodes(f"n[{text}]") == [f"n{number:03d}" for number in numbers]


@pytest.mark.parametrize(
    "text", ["", "n[01", "n01]", "n[]", "n[2-1]", "n[a-b]", "n[1,]", ",n", "n,,m", "n,", "a b"]
)
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(ClusterError, match="SLURM_STEP_NODELIST"):
        expand_nodes(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2,1", [2, 1]), ("2(x3)", [2, 2, 2]), ("4(x2),1", [4, 4, 1]), ("1", [1])],
)
def test_slurms_counts_of_tasks_are_expanded(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2x3", "2(3)", "2,", "-1", "(x3)"])
def test_what_are_no_counts_of_tasks_are_refused(text):
    with pytest.raises(ClusterError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_per_node(text)


@pytest.mark.parametrize("text", ["", "worker", "worker=x", "worker=1,worker=2", "worker=1;ps=1"])
def test_what_does_not_count_jobs_is_refused(text):
    with pytest.raises(ClusterError, match="MESHWRIGHT_JOBS"):
        parse_jobs(text)


def step(rank: int = 1, nodes: str = "n[01-02]", counts: str = "2,1", **more: str):
    tasks = sum(tasks_per_node(counts))
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        **more,
    }


def test_a_slurm_step_gives_what_tensorflows_resolver_gives():
    resolver = SlurmResolver({"ps": 1, "worker": 2}, environment=step())
    assert resolver.cluster_spec().as_dict() == {
        "ps": ["n01:8888"],
        "worker": ["n01:8889", "n02:8888"],
    }
    assert resolver.task() == Task("worker", 0)


@pytest.mark.parametrize(
    ("rank", "task"), [(0, "chief:0"), (1, "ps:0"), (2, "ps:1"), (3, "worker:0"), (5, "worker:2")]
)
def test_each_rank_of_a_slurm_step_is_a_task(rank, task):
    variables = step(rank, "n[1-3]", "2(x3)", MESHWRIGHT_JOBS="chief=1,ps=2,worker=3")
    resolver = resolve(variables)
    assert isinstance(resolver, SlurmResolver)
    assert str(resolver.task()) == task
    assert resolver.cluster_spec().task_address("ps", 1) == "n2:8888"


def test_slurm_may_be_asked_for_other_ports():
    jobs = {"ps": 1, "worker": 2}
    by_argument = SlurmResolver(jobs, 7000, environment=step())
    by_variable = SlurmResolver(jobs, environment=step(MESHWRIGHT_PORT="7000"))
    assert by_argument.cluster_spec().task_address("worker", 0) == "n01:7001"
    assert by_argument == by_variable


WRONG_STEPS = {
    "nothing": ({}, {"ps": 1, "worker": 2}, "not set: SLURM_PROCID, SLURM_STEP_NUM_TASKS"),
    "too few jobs": (step(), {"ps": 1, "worker": 1}, "(ps=1, worker=1) have 2 tasks together"),
    "no jobs": (step(), None, "MESHWRIGHT_JOBS is not set"),
    "no whole number": (step(), {"ps": 1, "worker": -2}, "worker=-2"),
    "an unknown job": (step(), {"ps": 2, "foobar": 1}, "unknown job 'foobar'"),
    "a rank too high": (step(rank=3), {"ps": 1, "worker": 2}, "SLURM_PROCID is 3"),
    "counts that do not agree": (
        step(SLURM_STEP_NUM_TASKS="4"),
        {"ps": 1, "worker": 2},
        "SLURM_STEP_NUM_TASKS is 4, and SLURM_STEP_TASKS_PER_NODE adds up to 3",
    ),
    "more nodes than counts": (
        step(nodes="n[01-03]"),
        {"ps": 1, "worker": 2},
        "names 3 nodes (n01, n02, n03)",
    ),
    "ranks given out in turn": (
        step(rank=1, SLURMD_NODENAME="n02", SLURM_LOCALID="0"),
        {"ps": 1, "worker": 2},
        "rank 1 is task 0 of n02, where ranks given out block by block make it task 1 of n01",
    ),
    "no port": (step(MESHWRIGHT_PORT="x"), {"ps": 1, "worker": 2}, "from 1 to 65535; received 'x'"),
}


@pytest.mark.parametrize(("variables", "jobs", "message"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_a_slurm_step_that_is_not_right_is_refused_by_name(variables, jobs, message):
    with pytest.raises(ClusterError) as caught:
        SlurmResolver(jobs, environment=variables)
    assert message in str(caught.value)


POD = {
    "MESHWRIGHT_JOB": "worker",
    "MESHWRIGHT_JOBS": "chief=1,ps=2,worker=3",
    "MESHWRIGHT_SERVICE": "train",
    "HOSTNAME": "my-run-worker-2",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}


def test_a_pod_knows_its_task_and_all_others_by_their_names():
    resolver = resolve(POD)
    assert isinstance(resolver, KubernetesResolver)
    assert resolver.task() == Task("worker", 2)
    assert resolver.cluster_spec().as_dict() == {
        "chief": ["my-run-chief-0.train:8888"],
        "ps": ["my-run-ps-0.train:8888", "my-run-ps-1.train:8888"],
        "worker": [f"my-run-worker-{index}.train:8888" for index in range(3)],
    }


WRONG_PODS = {
    "nothing": ({}, "not set: MESHWRIGHT_JOB, MESHWRIGHT_JOBS, MESHWRIGHT_SERVICE, HOSTNAME"),
    "no service": ({**POD, "MESHWRIGHT_SERVICE": ""}, "not set: MESHWRIGHT_SERVICE."),
    "a name of another job": ({**POD, "HOSTNAME": "my-run-ps-0"}, "HOSTNAME='my-run-ps-0'"),
    "a name without an index": ({**POD, "HOSTNAME": "my-run-worker"}, "'-worker-<index>'"),
    "an index out of range": ({**POD, "HOSTNAME": "r-worker-3"}, "worker:3 is not in the cluster"),
    "an unknown job": (
        {**POD, "MESHWRIGHT_JOB": "foobar", "HOSTNAME": "r-foobar-0"},
        "unknown job 'foobar'",
    ),
}


@pytest.mark.parametrize(
    ("resolver", "variables", "message"),
    [
        pytest.param(resolver, variables, message, id=f"{resolver.__name__}: {name}")
        for resolver, wrong in (
            (TFConfigResolver, WRONG_TF_CONFIGS),
            (KubernetesResolver, WRONG_PODS),
        )
        for name, (variables, message) in wrong.items()
    ],
)
def test_variables_that_are_not_right_are_refused_by_name(resolver, variables, message):
    with pytest.raises(ClusterError) as caught:
        resolver(variables)
    assert message in str(caught.value)
    assert resolver is not TFConfigResolver or "TF_CONFIG" in str(caught.value)


def test_meshwrights_own_variables_come_first():
    own = {"MESHWRIGHT_CLUSTER": json.dumps(CLUSTER), "MESHWRIGHT_TASK": "ps:0"}
    resolver = resolve({**tf_config(task={"type": "worker", "index": 0}), **POD, **step(), **own})
    assert resolver == EnvironmentResolver(own)
    assert resolver.task() == Task("ps", 0)


def test_where_nothing_tells_of_a_cluster_the_variables_looked_for_are_named():
    with pytest.raises(ClusterError) as caught:
        resolve({"HOME": "/"})
    for name in ("MESHWRIGHT_CLUSTER", "TF_CONFIG", "MESHWRIGHT_JOB", "SLURM_PROCID"):
        assert name in str(caught.value)
    assert not tells_of_cluster({"HOME": "/"})
    assert tells_of_cluster({"MESHWRIGHT_TASK": "ps:0"})
    assert tells_of_cluster(step())
    # An interactive shell on a node, and what sbatch starts, are steps of one task.
    assert not tells_of_cluster({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})


def test_a_cluster_in_a_variable_that_is_not_set_or_not_right_is_refused():
    with pytest.raises(ClusterError, match="MESHWRIGHT_CLUSTER is not set"):
        EnvironmentResolver({})
    with pytest.raises(ClusterError, match="the cluster is not valid JSON"):
        EnvironmentResolver({"MESHWRIGHT_CLUSTER": "{"})


def test_a_resolver_says_what_to_write_in_a_with_statement():
    resolver = SimpleResolver(CLUSTER)
    match = r"with mw\.ParameterServer\(mw\.run_task\(\)\) as"
    with pytest.raises(ClusterError, match=match), resolver:
        pass
