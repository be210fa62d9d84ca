"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, all on loopback.

It needs Debian's packages slurmctld, slurmd, slurm-client and munge, and root. The nodes ``n0`` and
``n1`` are names in an ``/etc/hosts`` that only its processes see.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare")

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=10
InactiveLimit=0
FirstJobId={first_job}
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no such cluster here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurmctld slurmd munge)"
    return "" if os.getuid() == 0 else "slurmd needs root"


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class SlurmCluster:
    """The daemons, for as long as it is open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        ports = free_ports(3)
        # A job's number gives the port where its group meets: no two clusters should share any.
        values = {"folder": folder, "ports": ports, "first_job": random.randrange(1, 2000)}
        host = socket.gethostname()
        for name in ("state", "spool.n0", "spool.n1"):
            (folder / name).mkdir()
        (folder / "hosts").write_text(f"127.0.0.1 localhost n0 n1 {host}\n")
        (folder / "slurm.conf").write_text(CONFIG.format(host=host, **values))
        (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        folder.chmod(0o755)
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}

    def __enter__(self) -> Self:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        options = [f"--{o}={self.folder}/munge.{end}" for o, end in files.items()]
        options += [f"--seed-file={self.folder}/munge.seed", "--force", "--foreground"]
        try:
            self._start("munged", *options)
            _until(lambda: (self.folder / "munge.socket").exists(), "munged does not listen")
            self._start("slurmctld", "-D")
            for node in ("n0", "n1"):
                self._start("slurmd", "-D", "-N", node)
            idle = "n0 idle\nn1 idle\n"
            _until(
                lambda: self.run("sinfo", "-N", "-h", "-o", "%N %T").stdout == idle,
                "the nodes do not come up",
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all jobs and daemons."""
        if len(self._daemons) > 1:
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
            with contextlib.suppress(AssertionError):  # else they outlive the daemons
                _until(lambda: not self.run("squeue", "-h").stdout, "jobs do not end")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands to its end."""
        return subprocess.run(
            command,
            env={**self.env, **more},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=180,
        )

    def logs(self) -> str:
        """What the daemons have written."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def _start(self, *command: str) -> None:
        inside = f'mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        wrapped = ["unshare", "--mount", "sh", "-c", inside, "sh", *command]
        output = (self.folder / f"{command[0]}.out").open("ab")
        with output:
            self._daemons.append(
                subprocess.Popen(wrapped, env=self.env, stdout=output, stderr=output)
            )


def _until(true: object, fault: str) -> None:
    until_s = time.monotonic() + 30
    assert callable(true)
    while not true():
        assert time.monotonic() < until_s, fault
        time.sleep(0.2)
