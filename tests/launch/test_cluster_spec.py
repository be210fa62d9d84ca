"""Clusters and tasks as values: TensorFlow's forms, and every fault by name."""

from __future__ import annotations

import re

import pytest

from meshwright import ClusterError
from meshwright.launch import ClusterSpec, SimpleResolver, Task

DENSE = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
SPARSE = {"worker": {1: "b:1", 3: "d:1"}, "ps": ["a:1"]}


def test_a_dense_cluster_answers_as_tensorflows_does():
    spec = ClusterSpec(DENSE)
    assert spec.jobs == ["chief", "worker", "ps"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "c:1"
    assert spec.job_tasks("worker") == ["b:1", "c:1"]
    assert spec.as_dict() == DENSE
    assert [str(task) for task in spec.tasks] == ["chief:0", "worker:0", "worker:1", "ps:0"]


def test_a_sparse_cluster_answers_as_tensorflows_does():
    spec = ClusterSpec(SPARSE)
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "b:1", None, "d:1"]
    assert spec.as_dict() == SPARSE


@pytest.mark.parametrize("jobs", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_a_cluster_survives_text_and_copies_and_is_hashable(jobs):
    spec = ClusterSpec(jobs)
    assert ClusterSpec.from_json(spec.to_json()) == spec
    assert ClusterSpec(spec) == spec
    assert ClusterSpec(spec.as_dict()) == spec
    assert eval(repr(spec)) == spec
    assert len({spec, ClusterSpec(jobs)}) == 1


def test_the_order_in_which_jobs_and_indices_are_given_does_not_count():
    turned = {"ps": ["a:1"], "worker": {3: "d:1", 1: "b:1"}}
    assert ClusterSpec(turned) == ClusterSpec(SPARSE)
    many = {index: f"h{index}:1" for index in reversed(range(12))}
    assert ClusterSpec({"worker": many, "ps": ["a:1"]}).task_indices("worker") == list(range(12))


def test_tasks_come_and_go():
    spec = ClusterSpec(DENSE)
    grown = spec.with_task(Task("worker", 2), "e:1")
    assert grown.task_indices("worker") == [0, 1, 2]
    assert grown.without_task(Task("worker", 2)) == spec
    assert spec.without_task(Task("worker", 0)).task_indices("worker") == [1]
    with pytest.raises(ClusterError, match="there must be at least one ps"):
        spec.without_task(Task("ps", 0))


FAULTS = {
    "empty": ({}, ["the cluster is empty"]),
    "no ps": ({"worker": ["a:1"]}, ["there must be at least one ps"]),
    "an empty ps": ({"worker": ["a:1"], "ps": []}, ["there must be at least one ps"]),
    "no worker": ({"ps": ["a:1"]}, ["there must be at least one worker"]),
    "two chiefs": (
        {**DENSE, "chief": ["x:1", "y:1"]},
        ["at most one chief, and the cluster has several: x:1, y:1"],
    ),
    "no chief in the job": ({**DENSE, "chief": []}, ["job 'chief' has no tasks"]),
    "an unknown job": ({**DENSE, "foobar": ["x:1"]}, ["unknown job 'foobar'"]),
    "an address twice": (
        {"worker": ["a:1"], "ps": ["a:1"]},
        ["address 'a:1' is that of worker:0 and ps:0"],
    ),
    "no port": ({"worker": ["a"], "ps": ["b:1"]}, ["worker:0 has address 'a'"]),
    "a port too high": ({"worker": ["a:70000"], "ps": ["b:1"]}, ["has address 'a:70000'"]),
    "no text": ({"worker": [None], "ps": ["b:1"]}, ["worker:0 has address None"]),
    "a negative index": ({"worker": {-1: "a:1"}, "ps": ["b:1"]}, ["index -1 of job 'worker'"]),
    "several at once": (
        {"foobar": ["x:1"], "chief": ["a:1", "a:1"], "worker": ["no port"]},
        [
            "unknown job 'foobar'",
            "at least one ps",
            "at most one chief",
            "address 'a:1' is that of chief:0 and chief:1",
            "worker:0 has address 'no port'",
        ],
    ),
}


@pytest.mark.parametrize(("jobs", "message"), FAULTS.values(), ids=FAULTS)
def test_a_cluster_that_is_not_right_is_refused_by_name(jobs, message):
    with pytest.raises(ClusterError) as caught:
        ClusterSpec(jobs)
    for part in message:
        assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) == len(message)


@pytest.mark.parametrize("jobs", [None, ["a:1"], {"worker": "a:1", "ps": ["b:1"]}, {"worker": 3}])
def test_what_is_no_cluster_at_all_is_refused(jobs):
    with pytest.raises(ClusterError, match=r"received|such as"):
        ClusterSpec(jobs)


def test_jobs_and_tasks_that_are_not_there_are_named():
    spec = ClusterSpec(SPARSE)
    with pytest.raises(ClusterError, match=r"no job 'zzz' in this cluster: it has worker, ps"):
        spec.num_tasks("zzz")
    with pytest.raises(ClusterError, match=r"no task 0 in job 'worker': its tasks are 1, 3"):
        spec.task_address("worker", 0)


@pytest.mark.parametrize(
    "address",
    ["a:1", "10.0.0.1:65535", "[::1]:80", "tcp://n01:8888", "ipc:///run/ps0", "a-b.c.svc:1"],
)
def test_addresses_of_all_forms_are_taken(address):
    assert ClusterSpec({"worker": [address], "ps": ["z:9"]}).task_address("worker") == address


def test_a_task_is_read_from_its_text():
    assert Task.parse(" worker:12 ") == Task("worker", 12)
    assert Task.parse("chief") == Task("chief", 0)
    for text in ("", "worker:", "worker:-1", "worker:1:2"):
        with pytest.raises(ClusterError, match="expected a task such as"):
            Task.parse(text)
    with pytest.raises(ClusterError, match=r"unknown job 'foobar'.*\n.*index -1"):
        Task("foobar", -1)


def test_a_resolver_refuses_a_task_that_its_cluster_does_not_have():
    with pytest.raises(ClusterError, match=r"worker:2 is not in the cluster.*workers are 0, 1"):
        SimpleResolver(DENSE, "worker:2")
    with pytest.raises(ClusterError, match=re.escape("chief:0 is not in the cluster, which has")):
        SimpleResolver(SPARSE, Task("chief", 0))
    assert SimpleResolver(DENSE).task() is None
    assert SimpleResolver(DENSE, "evaluator:0").task() == Task("evaluator", 0)
