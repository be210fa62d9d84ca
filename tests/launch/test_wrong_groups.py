"""What a person may get wrong: each is an error that names rank and host, and a way out."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_ports
from test_companion import ended, started

from meshwright import ClusterError
from meshwright.fabric import Peer, notes_on
from meshwright.launch.group import run_group
from meshwright.launch.group_options import GroupOptions
from meshwright.launch.hosts import run_on_hosts
from meshwright.launch.nodes import rendezvous

JOIN = "import meshwright as mw\nmw.join(wait_s=3)\nprint('joined')\n"
HOST = socket.gethostname()


def needs_namespaces(function):
    is_there = os.getuid() == 0 and shutil.which("unshare") is not None
    function = pytest.mark.skipif(not is_there, reason="needs root and unshare")(function)
    return pytest.mark.alone(pytest.mark.full(function))


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(JOIN)
    return str(tmp_path / "train.py")


@pytest.mark.alone
@pytest.mark.full
@pytest.mark.parametrize("which", [0, 1])
def test_a_port_that_is_taken_is_named_by_rank_0(program, which):
    port = free_ports(2)[0]
    with socket.create_server(("127.0.0.1", port + which)):
        results = ended(started([program], MASTER_PORT=str(port)))
    code, text = results[0]
    assert code == 1
    assert f"rank 0 (host {HOST}): port {port + which} is taken by another program" in text
    assert "MESHWRIGHT_COORDINATOR=host:port" in text
    assert results[1][0] == 1  # and does not hang


@pytest.mark.alone
@pytest.mark.full
def test_a_host_that_nothing_knows_is_named_by_every_rank(program):
    results = ended(started([program], MASTER_ADDR="no-such-host.invalid"))
    for rank, (code, text) in enumerate(results):
        assert code == 1
        assert f"rank {rank} (host {HOST}): unknown host 'no-such-host.invalid'" in text
        assert "(torchrun)" in text


@needs_namespaces
def test_a_coordinator_that_a_firewall_hides_is_named(program):
    """Rank 1 is in a network of its own, from which nothing is reached."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.255.255.1"}
    run = subprocess.run(
        ["unshare", "--net", sys.executable, program],
        env={**os.environ, **variables, "MASTER_PORT": "29500"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert re.search(
        r"rank 0 does not answer rank 1 \(host \S+, pid \d+\) at tcp://10\.255\.255\.1:29501 "
        r"within 3 s\. .*firewall",
        run.stderr,
    )


TRAIN = """
import meshwright as mw
mw.join()
import keras, numpy as np, sys
strategy = mw.DataParallel(mw.create_mesh({"batch": -1}))
with strategy.scope():
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
x, y = np.ones([64, 8], "float32"), np.ones([64, 4], "float32")
strategy.fit(model, x, y, batch_size=16, epochs=1, verbose=0, checkpoint=sys.argv[1] + "/saved")
print("done")
"""


@needs_namespaces
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_checkpoint_folder_that_is_not_shared_is_named_before_the_first_step(tmp_path, is_shared):
    """Rank 1 has a file system of its own over the folder, as a host without the mount would."""
    folder, program = tmp_path / "runs", tmp_path / "train.py"
    folder.mkdir()
    program.write_text(TRAIN)
    alone = f'[ $RANK = 1 ] && mount -t tmpfs none {folder}; exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", 'exec "$@"' if is_shared else alone, "sh"]
    results = ended(started([str(program), str(folder)], before))
    if is_shared:
        assert [(code, "done" in text) for code, text in results] == [(0, True)] * 2, results
        assert not list((folder / "saved").glob(".shared*"))
        return
    for code, text in results:
        assert code == 1, text
        assert f"checkpoint folder {folder}/saved, which all must share: shared with rank 0" in text
        assert re.search(r"another folder than that of rank 0 .* on rank 1 \(host \S+, pid", text)


def test_a_rendezvous_that_nothing_knows_is_refused():
    with pytest.raises(ClusterError, match=r"--rendezvous: unknown host 'no-such-host\.invalid'"):
        rendezvous("no-such-host.invalid:7777", (1, 2))


@pytest.mark.alone
def test_a_host_without_this_python_is_named(tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sh -c 'exec /no/such/python'\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ClusterError, match=r"host 'bare' cannot run .*python.*not found"):
        run_on_hosts(["bare"], ["--processes", "1"], ["train.py"])


def test_more_processes_than_gpus_are_refused(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(ClusterError, match=r"2 GPUs \(0, 1\) cannot be shared out .* 4 processes"):
        run_group([str(tmp_path / "train.py")], GroupOptions(4))


def test_clocks_and_versions_that_differ_are_noted():
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", "keras": "3.15.1", "meshwright": "0.1.0"}
    other = {**versions, "jax": "0.9.0"}
    here = Peer(0, "n01", 17, "3.11.7", versions, "1 cpu")
    there = Peer(1, "n02", 18, "3.12.1", other, "2 cpu", clock_s=-90.5)
    clocks, python, packages, devices = notes_on([here, there], error_s=0.01)
    assert "rank 1 (host n02) by -90.5 s" in clocks
    assert "NTP" in clocks
    assert python.startswith("versions of Python differ: 3.11.7 on rank 0, 3.12.1 on rank 1.")
    assert packages.startswith("versions of jax differ: 0.10.2 on rank 0, 0.9.0 on rank 1.")
    assert "different devices" in devices
    assert notes_on([here, here], error_s=0.01) == ()
