"""``meshwright launch --hosts`` with the real ``ssh``, and a real ``sshd`` on a port of loopback.

The server and the client have keys and settings of their own, in a folder of the test.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from watching import within

import meshwright as mw
from meshwright import ClusterError
from meshwright.launch.hosts import run_on_hosts

PROGRAM = str(Path(__file__).parent / "grouped.py")
HOSTS = ["127.0.0.1", "localhost"]
OPTIONS = ["--processes", "1", "--devices", "2"]
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
_SEPARATE = Path("/run/sshd")  # where a server of root keeps what asks for passwords

pytestmark = [
    pytest.mark.targets,
    pytest.mark.alone,
    pytest.mark.skipif(
        SSHD is None or shutil.which("ssh") is None,
        reason="ssh and sshd are not installed (apt install openssh-server)",
    ),
]

_SERVER = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PidFile none
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv PYTHONPATH="{path}" JAX_PLATFORMS=cpu EPOCHS=100000
"""
_CLIENT = """
Host *
HostName 127.0.0.1
Port {port}
IdentityFile {folder}/{key}
IdentitiesOnly yes
IdentityAgent none
UserKnownHostsFile {folder}/known
StrictHostKeyChecking yes
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The folder with the keys, and the port of a server that lets the first of them in."""
    folder, port = tmp_path_factory.mktemp("sshd"), free_port()
    for key in ("host", "user", "stranger"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True)
    public = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {public}")
    path = os.pathsep.join(path for path in sys.path if path)
    (folder / "server").write_text(_SERVER.format(folder=folder, port=port, path=path))
    is_ours = os.geteuid() == 0 and not _SEPARATE.exists()
    if is_ours:
        _SEPARATE.mkdir(mode=0o755)
    log = folder / "log"
    command = [str(SSHD), "-D", "-f", str(folder / "server"), "-E", str(log)]
    with subprocess.Popen(command) as process:
        try:
            assert within(10, lambda: _answers(port)), log.read_text()
            yield folder, port
        finally:
            process.terminate()
            if is_ours:
                _SEPARATE.rmdir()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def let_ssh_use(key: str, server: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``ssh`` use this key and no settings of the user."""
    folder, port = server
    settings = folder / f"as-{key}"
    settings.write_text(_CLIENT.format(folder=folder, port=port, key=key))
    real = shutil.which("ssh")
    (folder / f"bin-{key}").mkdir(exist_ok=True)
    ssh = folder / f"bin-{key}" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {real} -F {settings} "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=os.pathsep)


def test_hosts_that_a_real_server_lets_in_train_together(server, tmp_path, capfd, monkeypatch):
    let_ssh_use("user", server, monkeypatch)
    assert run_on_hosts(HOSTS, OPTIONS, [PROGRAM, str(tmp_path), "nothing"]) == 0
    out = capfd.readouterr().out
    for rank in range(2):
        line = rf"^\[(127\.0\.0\.1|localhost)\] \[rank:{rank}\] loss \S+ 2 4$"
        assert re.search(line, out, re.MULTILINE), out


def test_the_program_of_each_host_saves_and_ends_with_the_launcher_that_was_killed(
    server, tmp_path, monkeypatch
):
    let_ssh_use("user", server, monkeypatch)
    (tmp_path / "plan.json").write_text("{}")
    program = [PROGRAM.replace("grouped", "rows_once"), str(tmp_path)]
    hosts = ["--hosts", ",".join(HOSTS), *OPTIONS]
    command = [sys.executable, "-m", "meshwright.cli", "launch", *hosts, *program]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as launcher:
        try:
            assert within(120, (tmp_path / "starts").exists)
        finally:
            launcher.send_signal(signal.SIGKILL)
    assert within(30, lambda: not _running(str(tmp_path)))
    assert mw.Checkpoints(tmp_path / "saved").latest is not None


def _running(argument: str) -> list[int]:
    """The processes that have this argument."""
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if argument.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                results.append(int(folder.name))
    return results


def test_a_server_that_refuses_the_key_is_named_with_what_ssh_says(server, monkeypatch):
    let_ssh_use("stranger", server, monkeypatch)
    began_s = time.monotonic()
    either = "|".join(map(re.escape, HOSTS))  # both refuse; the first to answer is named
    with pytest.raises(ClusterError, match=rf"ssh does not reach host '({either})': .*Permission"):
        run_on_hosts(HOSTS, OPTIONS, [PROGRAM])
    assert time.monotonic() - began_s < 30
