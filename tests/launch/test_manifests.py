"""Jobs for schedulers: what is written, and whether it is what the schedulers accept."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from meshwright import ClusterError
from meshwright.cli import main
from meshwright.launch.manifests import Job
from meshwright.launch.yaml import to_yaml

SCHEMAS = Path(__file__).parent / "schemas"


def schema(kind: str) -> Any:
    """A published schema; see README.md beside it for sources and licences."""
    return json.loads(gzip.decompress((SCHEMAS / f"{kind}.json.gz").read_bytes()))


def job(**more: Any) -> Job:
    settings = {"nodes": 2, "processes": 4, "gpus": 8, "image": "registry/train:1", **more}
    return Job(("train.py", "--epochs", "3"), **settings)


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("jobset", ["JobSet"]),
        ("trainjob", ["TrainingRuntime", "TrainJob"]),
        ("ray", ["RayJob"]),
    ],
)
def test_manifests_fulfil_the_published_schemas(kind, kinds):
    documents = list(yaml.safe_load_all(job().write(kind)))
    assert [document["kind"] for document in documents] == kinds
    for document in documents:
        jsonschema.validate(document, schema(document["kind"]))


@pytest.mark.parametrize("kind", ["JobSet", "TrainingRuntime", "TrainJob", "RayJob"])
def test_the_schemas_refuse_a_field_that_is_misspelt(kind):
    of = {"JobSet": "jobset", "TrainingRuntime": "trainjob", "TrainJob": "trainjob"}
    documents = yaml.safe_load_all(job().write(of.get(kind, "ray")))
    (document,) = (document for document in documents if document["kind"] == kind)
    document["spec"]["no-such-field"] = 1
    with pytest.raises(jsonschema.ValidationError, match="no-such-field"):
        jsonschema.validate(document, schema(kind))


def test_processes_are_pods_that_know_each_other_and_gpus_are_shared_out():
    (document,) = yaml.safe_load_all(job(name="digits").write("jobset"))
    spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 8
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["JAX_COORDINATOR_ADDRESS"] == "digits-worker-0-0.digits:8476"
    assert env["JAX_NUM_PROCESSES"] == "8"
    assert env["MESHWRIGHT_JOIN"] == "1"


def test_exit_code_75_and_eviction_do_not_count_as_failures():
    (jobset,) = yaml.safe_load_all(job().write("jobset"))
    runtime, _ = yaml.safe_load_all(job().write("trainjob"))
    for spec in (jobset["spec"], runtime["spec"]["template"]["spec"]):
        (rule,) = spec["failurePolicy"]["rules"]
        assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        pods = spec["replicatedJobs"][0]["template"]["spec"]
        by_code, by_condition = pods["podFailurePolicy"]["rules"]
        container = pods["template"]["spec"]["containers"][0]["name"]
        assert by_code["onExitCodes"]["containerName"] == container
        assert by_code["onExitCodes"]["values"] == [75]
        assert by_condition["onPodConditions"][0]["type"] == "DisruptionTarget"


_SRUN = """#!/bin/bash
echo run "$@"; shift; highest=0
for task in $CODES; do
  TASK=$task "$@"; code=$?; [ $code -gt $highest ] && highest=$code
done
exit $highest
"""


@pytest.mark.parametrize(
    ("of_tasks", "code", "runs", "is_requeued"),
    [
        ("0 0", 0, 1, False),
        ("75 75", 75, 1, True),
        ("0 75", 75, 1, True),
        ("1 75", 76, 3, False),  # srun gives the highest code, and one has failed
        ("1 1", 76, 3, False),
        ("137 75", 137, 3, False),
    ],
)
def test_a_script_for_sbatch_requeues_only_what_has_saved(
    tmp_path, of_tasks, code, runs, is_requeued
):
    (tmp_path / "srun").write_text(_SRUN)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho scontrol $@\n")
    (tmp_path / "train").write_text("#!/bin/sh\nexit $TASK\n")
    for name in ("srun", "scontrol", "train"):
        (tmp_path / name).chmod(0o755)
    script = job(gpus=0, devices=2, max_restarts=2).write("slurm")
    script = script.replace(f"{sys.executable} train.py", "train")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CODES": of_tasks, "SLURM_JOB_ID": "17"}
    run = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert run.returncode == code, run
    assert run.stdout.count("run --kill-on-bad-exit=0") == runs
    assert ("scontrol requeue 17" in run.stdout) == is_requeued


def test_a_task_of_slurm_that_gets_sigterm_ends_with_the_code_of_its_program():
    script = Job(("-c", "import signal, sys; signal.pause()")).write("slurm")
    (line,) = (line for line in script.splitlines() if line.strip().startswith("srun"))
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print(flush=True)\nsignal.pause()"
    )
    command = [*shlex.split(line)[2:-1], program]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as task:
        assert task.stdout is not None
        task.stdout.readline()
        os.killpg(task.pid, signal.SIGTERM)  # as Slurm does: all processes of the task
        assert task.wait(10) == 75


def test_invalid_jobs_are_refused_with_all_faults():
    with pytest.raises(ClusterError, match=r"nodes must be.*\nname must be small letters"):
        job(nodes=0, name="Digits!")
    with pytest.raises(ClusterError, match="8 GPUs of a node cannot be shared out evenly among 3"):
        job(processes=3)
    with pytest.raises(ClusterError, match="pods need an image"):
        job(image="").write("jobset")


def test_the_command_prints_a_job_and_starts_nothing():
    options = ["--nodes", "2", "--processes", "4", "--name", "digits"]
    result = CliRunner().invoke(main, ["launch", "--write", "slurm", *options, "train.py", "-v"])
    assert result.exit_code == 0, result.output
    assert "#SBATCH --ntasks-per-node=4" in result.output
    assert "train.py -v" in result.output
    result = CliRunner().invoke(main, ["launch", "--processes", "2", "--image", "a", "train.py"])
    assert result.exit_code == 2
    assert "--image: only valid with --write" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ray", "--processes", "2:8"], "--processes must be one number with --ray"),
        (
            ["--ray", "--processes", "2", "--hosts", "a,b", "--log-dir", "x", "--no-agree"],
            "--hosts, --log-dir, --no-agree: not supported with --ray",
        ),
        (["--ray", "--processes", "2", "--nodes", "2"], "--nodes: not supported with --ray"),
        (["--write", "slurm", "--stall-timeout", "3"], "--stall-timeout: not supported with"),
        (["--no-standby", "--workers", "2"], "--no-standby: only valid for a group"),
        (
            ["--processes", "1", "--rendezvous", "a:1", "--ps", "2", "--image", "b"],
            "--image: only valid with --write. --ps: only valid for a cluster of workers and "
            "servers. --rendezvous: only valid with --nodes N.",
        ),
        (
            ["--processes", "1", "--nodes", "2", "--hosts", "a,b", "--rendezvous", "a:1"],
            "--rendezvous: not supported with --hosts.",
        ),
    ],
)
def test_options_that_would_be_ignored_are_refused(arguments, says):
    result = CliRunner().invoke(main, ["launch", *arguments, "train.py"])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_the_configuration_says_how_often_a_job_is_started_again(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.meshwright.launch]\nmax-restarts = 7\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["launch", "--write", "slurm", "train.py"])
    assert "seq 0 7" in result.output, result.output


@pytest.mark.parametrize(
    "value",
    [
        {"a": [], "b": {}, "c": [[1, 2], [{"d": None}]], "e": {"f": True, "g": 0.5}},
        {"text": "true", "no": "on", "number": "75", "colon": "a: b", "ends": "x\ny", "": "#"},
        {"list": [{"name": "a", "values": [1]}, "b", "- c", "é"]},
    ],
)
def test_what_is_written_as_yaml_reads_back(value):
    assert yaml.safe_load(to_yaml(value)) == value
