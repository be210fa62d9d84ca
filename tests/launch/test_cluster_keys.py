"""Keys of a cluster: who holds what, and files that no other user may read."""

from __future__ import annotations

import json
import stat
import subprocess
import sys

import pytest

from meshwright import ClusterError
from meshwright.launch import Keys


def test_a_worker_does_not_hold_the_servers_secret():
    keys = Keys.make()
    worker = keys.of("worker")
    assert keys.secret not in (worker.secret, worker.client_secret)
    assert worker.server_public == keys.public
    assert keys.allowed == {keys.public, worker.public}
    assert keys.of("ps") == keys.of("chief") == keys
    assert worker.of("evaluator") == worker


def test_a_workers_keys_are_none_for_a_server():
    with pytest.raises(ClusterError, match="keys of a worker, and a ps needs the servers' pair"):
        Keys.make().of("worker").of("ps")


def test_no_two_clusters_have_the_same_keys_and_no_secret_is_printed():
    keys, others = Keys.make(), Keys.make()
    assert not {keys.public, keys.secret} & {others.public, others.secret}
    visible = repr(keys)
    assert keys.public in visible
    assert keys.secret not in visible
    assert keys.client_secret not in visible


def test_a_file_of_keys_is_for_its_owner_alone_and_reads_back(tmp_path):
    keys, path = Keys.make(), tmp_path / "keys.json"
    keys.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keys.load(path) == keys
    keys.of("worker").save(tmp_path / "workers.json")
    assert Keys.load(tmp_path / "workers.json") == keys.of("worker")
    assert keys.secret not in (tmp_path / "workers.json").read_text()


def test_a_file_of_keys_that_is_there_is_not_written_over(tmp_path):
    Keys.make().save(tmp_path / "keys.json")
    before = (tmp_path / "keys.json").read_text()
    with pytest.raises(ClusterError, match="cannot be written to"):
        Keys.make().save(tmp_path / "keys.json")
    assert (tmp_path / "keys.json").read_text() == before


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", json.dumps({"public": "short"})])
def test_a_file_that_holds_no_keys_is_refused(tmp_path, text):
    path = tmp_path / "keys.json"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(ClusterError, match="holds no keys"):
        Keys.load(path)


def test_a_file_that_is_not_there_or_open_to_others_is_refused(tmp_path):
    with pytest.raises(ClusterError, match="cannot be read: No such file"):
        Keys.load(tmp_path / "keys.json")
    Keys.make().save(tmp_path / "keys.json")
    (tmp_path / "keys.json").chmod(0o640)
    with pytest.raises(ClusterError, match=r"can be read by others \(mode 0640\).*chmod 600"):
        Keys.load(tmp_path / "keys.json")


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_of_keys_that_others_may_write_is_refused(mode, tmp_path):
    Keys.make().save(tmp_path / "keys.json")
    (tmp_path / "keys.json").chmod(mode)
    with pytest.raises(ClusterError, match=r"can be written to by others \(mode 06.*chmod 600"):
        Keys.load(tmp_path / "keys.json")


@pytest.mark.alone
def test_a_command_makes_a_file_of_keys(tmp_path):
    command = [sys.executable, "-m", "meshwright.launch.new_keys", str(tmp_path / "keys.json")]
    first = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (first.returncode, first.stderr) == (0, "")
    assert Keys.load(tmp_path / "keys.json").allowed
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1
    assert again.stderr.startswith("Error: the keys cannot be written to")
