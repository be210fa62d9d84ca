"""The wire between real processes: one that is killed and comes back, and what one must load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import UnreachableError
from meshwright.launch.keys import Keys
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.sockets import SocketChannel

WAIT_S = 30.0
PUSHED = np.arange(100_000, dtype=np.float32)
SERVER = """
import sys
import numpy as np
from meshwright.launch.keys import Keys
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.sockets import Listener

address, keys, deaf = sys.argv[1], Keys.load(sys.argv[2]), sys.argv[3] == "deaf"
with Listener(address, keys.of("ps"), task="ps:0") as listener:
    print("listening", flush=True)
    while True:
        for peer, message in listener.poll(1.0):
            if deaf and message.kind == "push":
                print("pushed", flush=True)  # and never answered
            else:
                answer = Message("ok", {}, tuple(2 * array for array in message.arrays))
                listener.answer(peer, answer, message.head["id"])
"""


@contextmanager
def server(address: str, keys: Path, how: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that answers with twice what it is sent; it is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, address, str(keys), how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "listening\n"
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()


@pytest.mark.alone
def test_what_a_killed_server_was_asked_is_answered_by_the_next(tmp_path: Path) -> None:
    address, keys, path = f"ipc://{tmp_path}/ps0", Keys.make(), tmp_path / "keys"
    keys.save(path)
    channel = SocketChannel(
        address, keys.of("worker"), "ps:0", hello=Message("hello"), timeout_s=WAIT_S
    )
    with channel:
        with server(address, path, "deaf") as first:
            channel.connect()
            assert channel._shared is not None
            numbers = [channel.send(Message("push", {}, (PUSHED + n,))) for n in range(3)]
            assert first.stdout is not None
            for _ in numbers:
                assert first.stdout.readline() == "pushed\n"
        with pytest.raises(UnreachableError, match=r"for 0\.2 s: it was connected, and is gone"):
            channel.wait(numbers[0], 0.2)
        with server(address, path):
            for n, number in enumerate(numbers):
                (result,) = channel.wait(number).arrays
                np.testing.assert_array_equal(result, 2 * (PUSHED + n))
            (result,) = channel.ask(Message("push", {}, (PUSHED,))).arrays
            np.testing.assert_array_equal(result, 2 * PUSHED)
            assert channel.connections == 2


@pytest.mark.alone
def test_the_wire_loads_neither_jax_nor_keras() -> None:
    program = (
        "import sys, meshwright.ps.wire.sockets, meshwright.ps.wire.memory, "
        "meshwright.ps.wire.values\n"
        "print(*sorted({'jax', 'jaxlib', 'keras', 'ml_dtypes', 'cloudpickle'} & {*sys.modules}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert result.stdout == "\n"
