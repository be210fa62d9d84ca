"""Jobs for schedulers: what is written, and whether it is what the schedulers accept."""

from __future__ import annotations

import gzip
import json
import subprocess
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
    asked = {"nodes": 2, "processes": 4, "gpus": 8, "image": "registry/train:1", **more}
    return Job(("train.py", "--epochs", "3"), **asked)


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


def test_a_script_for_sbatch_is_valid_bash_and_requeues_what_has_saved(tmp_path):
    (tmp_path / "srun").write_text("#!/bin/sh\necho run $@\nexit $CODE\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho scontrol $@\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    script = job(gpus=0, devices=2, max_restarts=2).write("slurm")
    for code, runs, requeued in ((0, 1, False), (75, 1, True), (1, 3, False)):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code), "SLURM_JOB_ID": "17"}
        run = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
        assert run.returncode == code
        assert run.stdout.count("run --kill-on-bad-exit=0") == runs
        assert ("scontrol requeue 17" in run.stdout) == requeued


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
    "value",
    [
        {"a": [], "b": {}, "c": [[1, 2], [{"d": None}]], "e": {"f": True, "g": 0.5}},
        {"text": "true", "no": "on", "number": "75", "colon": "a: b", "ends": "x\ny", "": "#"},
        {"list": [{"name": "a", "values": [1]}, "b", "- c", "é"]},
    ],
)
def test_what_is_written_as_yaml_reads_back(value):
    assert yaml.safe_load(to_yaml(value)) == value
