"""A real Slurm: ``srun`` starts the processes, one is killed, a job is preempted and requeued."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from keras_script import SETTING
from slurm_cluster import SlurmCluster, missing
from test_joining_by_hand import PROGRAM as PARAMETER_SERVER_PROGRAM
from watching import LOSS, soon_enough

from meshwright.launch import Keys
from meshwright.launch.manifests import Job

PROGRAM = str(Path(__file__).parent / "grouped.py")

pytestmark = [
    pytest.mark.alone,
    pytest.mark.targets,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "there"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as opened:
        yield opened


def test_srun_starts_a_group_on_two_nodes(cluster, tmp_path):
    run = cluster.run(
        "srun", "-N2", "-n2", sys.executable, PROGRAM, str(tmp_path), "nothing",
        JAX_NUM_CPU_DEVICES="2",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert len(re.findall(LOSS, run.stdout)) == 2, run


@pytest.mark.parametrize("fails", [0, 1])
def test_a_killed_task_is_named_by_the_others(cluster, tmp_path, fails):
    def named_after_s(folder: Path) -> float:
        run = cluster.run(
            "srun", "-N2", "-n2", "--kill-on-bad-exit=0",
            sys.executable, PROGRAM, str(folder), "kill", str(fails),
        )  # fmt: skip
        assert run.returncode != 0
        assert f"rank {fails} of 2" in run.stderr
        assert "was killed, or crashed in native code, after step 60" in run.stderr
        actual = json.loads((folder / "seen").read_text())
        assert actual["rank"] == fails
        return actual["at"] - json.loads((folder / "failed").read_text())

    assert soon_enough(1.0, tmp_path, named_after_s)


def test_tasks_of_a_step_are_servers_workers_and_the_chief(cluster, tmp_path):
    script, keys = tmp_path / "train.py", tmp_path / "keys.json"
    script.write_text(textwrap.dedent(PARAMETER_SERVER_PROGRAM))
    Keys.make().save(keys)
    variables = {"MESHWRIGHT_JOBS": "chief=1,ps=1,worker=2", "MESHWRIGHT_KEYS": str(keys)}
    command = ("srun", "-N2", "-n4", "--wait=5", "--kill-on-bad-exit=0")
    run = cluster.run(*command, sys.executable, str(script), **variables)
    assert "15.0\n" in run.stdout, run.stderr


TRAIN = (
    SETTING
    + """
import os, sys

class Mark(keras.callbacks.Callback):
    left = 3  # epochs, once the job is run again
    def on_epoch_end(self, epoch, logs=None):
        self.left -= "SLURM_RESTART_COUNT" in os.environ
        self.model.stop_training = not self.left
        if jax.process_index() == 0:
            print(f"epoch {epoch} of run {os.environ.get('SLURM_RESTART_COUNT', 0)}", flush=True)

strategy.fit(model, x, y, batch_size=16, epochs=10**6, verbose=0,
             checkpoint=sys.argv[1], callbacks=[Mark()])
print("done", flush=True)
"""
)


def test_a_preempted_job_saves_is_requeued_and_goes_on(cluster, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    job = Job((str(tmp_path / "train.py"), str(tmp_path / "saved")), nodes=2, name="digits")
    (tmp_path / "job.sh").write_text(job.write("slurm"))
    submitted = cluster.run("sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "job.sh"))
    assert submitted.returncode == 0, submitted.stderr
    number = submitted.stdout.strip()
    log = tmp_path / f"digits-{number}.log"
    wait_for(log, r"epoch 3 of run 0", 120)
    assert cluster.run("scancel", "--signal=TERM", number).returncode == 0
    wait_for(log, r"^done$", 240)
    text = log.read_text()
    first = [int(n) for n in re.findall(r"epoch (\d+) of run 0", text)]
    second = [int(n) for n in re.findall(r"epoch (\d+) of run 1", text)]
    assert second[0] in (first[-1], first[-1] + 1), text[-3000:]
    assert "Traceback" not in text


def wait_for(path: Path, pattern: str, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not (path.exists() and re.search(pattern, path.read_text(), re.MULTILINE)):
        text = path.read_text()[-3000:] if path.exists() else "no log"
        assert time.monotonic() < until_s, text
        time.sleep(0.5)
