"""A push-pull of 400 KB between two processes on one host, beside a plain TCP loop.

    python benchmarks/ps_push_pull.py            # about 10 s
    python benchmarks/ps_push_pull.py --rounds 1 --seconds 0.2

The client sends an array, the server adds it to its own and sends the sum back. Every way is
measured in turn, several rounds long, by two processes that live throughout; a ratio is taken
within one round, as the speed of a shared machine changes. The last rows are small requests.
CPU time is that of a whole process, with the threads that ZeroMQ has in it.
Writes ``benchmarks/results/ps_push_pull.json``, but not with ``--dry``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import report
import zmq
from quiet import Quiet, Sides

from meshwright.launch.keys import Keys
from meshwright.ps.wire.message import Message
from meshwright.ps.wire.sockets import Listener, SocketChannel

SIZE = 100_000  # float32: 400 KB
HELLO = Message("hello")
SMALL = Message("call", {"step": 17, "attempt": 0, "key": "0123456789abcdef", "done_below": 11})
# push-pulls per second asked for, and the ratio to plain TCP in the same round
WANTED: dict[str, tuple[float | None, float | None]] = {
    "plain TCP": (None, None),
    "shared memory": (2000, 1.0),
    "encrypted frames": (700, None),
    "pyzmq alone, encrypted": (None, None),
    "frames, no keys": (None, None),
    "small, pyzmq, encrypted": (None, None),
    "small, encrypted": (None, None),
    "small, no keys": (None, None),
}


def serve_meshwright(address: str, keys: Keys | None, told: Connection) -> None:
    """Add what is pushed, and answer with the sum; ``cpu`` is answered with the CPU time so far."""
    total = np.zeros(SIZE, np.float32)
    with Listener(address, keys, task="ps:0") as listener:
        told.send(listener.address)
        kind = ""
        while kind != "stop":
            for peer, message in listener.poll(1.0):
                kind = message.kind
                answer = Message("ok")
                if kind == "push":
                    np.add(total, message.arrays[0], out=total)
                    answer = Message("ok", {}, (total,))
                elif kind == "cpu":
                    answer = Message("ok", {"cpu_s": time.process_time()})
                listener.answer(peer, answer, message.head["id"])


def serve_pyzmq(address: str, keys: Keys, told: Connection) -> None:
    """Answer each message with itself: the least that ZeroMQ asks for."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.curve_server = True
        router.curve_secretkey = keys.secret.encode()
        router.bind(address)
        told.send(address)
        content = b""
        while content != b"stop":
            peer, content = router.recv(), router.recv()
            router.send(peer, zmq.SNDMORE)
            router.send(content if content != b"cpu" else str(time.process_time()).encode())


def serve_tcp(address: str, keys: None, told: Connection) -> None:
    """The same as a loop over a plain socket, with buffers that are made once."""
    total, pushed = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        told.send(str(listening.getsockname()[1]))
        connection, _ = listening.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (kind := connection.recv(1)) in (b"p", b"c"):
                if kind == b"p":
                    fill(connection, pushed)
                    np.add(total, pushed, out=total)
                    connection.sendall(total.data)
                else:
                    connection.sendall(np.float64(time.process_time()).tobytes())


def fill(connection: socket.socket, array: np.ndarray) -> None:
    view = array.view(np.uint8).data
    while view:
        view = view[connection.recv_into(view) :]


class Way:
    """One way of asking: ``once`` does it, and ``server_cpu_s`` is the other side's CPU time."""

    def __init__(self, once: Callable[[], None], server_cpu_s: Callable[[], float]) -> None:
        self.once = once
        self.server_cpu_s = server_cpu_s

    def measure(self, seconds: float) -> tuple[float, float, float]:
        """Per call: wall time, CPU time of this process, and of the server's, in seconds."""
        for _ in range(5):
            self.once()
        server_s, cpu_s, begun_s = self.server_cpu_s(), time.process_time(), time.perf_counter()
        count = 0
        while (wall_s := time.perf_counter() - begun_s) < seconds or count < 3:
            self.once()
            count += 1
        cpu_s = time.process_time() - cpu_s
        return wall_s / count, cpu_s / count, (self.server_cpu_s() - server_s) / count


@contextmanager
def process(target: Callable[..., None], address: str, keys: Keys | None) -> Iterator[str]:
    """A server in a process of its own; its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(address, keys, theirs), daemon=True)
    child.start()
    try:
        yield ours.recv()
    finally:
        child.join(5)
        child.kill()


@contextmanager
def meshwright(address: str, keys: Keys | None, *, shared: bool, message: Message) -> Iterator[Way]:
    with (
        process(serve_meshwright, address, keys) as found,
        SocketChannel(
            found, keys and keys.of("worker"), "ps:0", hello=HELLO, shared=shared, timeout_s=30
        ) as channel,
    ):
        channel.connect()
        cpu = Message("cpu")
        yield Way(lambda: used(channel.ask(message)), lambda: channel.ask(cpu).head["cpu_s"])
        channel.ask(Message("stop"))


@contextmanager
def pyzmq(address: str, keys: Keys, content: bytes) -> Iterator[Way]:
    client = keys.of("worker")
    with (
        process(serve_pyzmq, address, keys) as found,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.curve_publickey = client.public.encode()
        dealer.curve_secretkey = client.secret.encode()
        dealer.curve_serverkey = client.server_public.encode()
        dealer.connect(found)

        def ask(content: bytes) -> bytes:
            dealer.send(content)
            return dealer.recv()

        yield Way(lambda: used(ask(content)), lambda: float(ask(b"cpu")))
        ask(b"stop")


@contextmanager
def plain_tcp(array: np.ndarray) -> Iterator[Way]:
    pulled = np.zeros_like(array)
    cpu_s = np.zeros(1)
    with (
        process(serve_tcp, "", None) as port,
        socket.create_connection(("127.0.0.1", int(port))) as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def once() -> None:
            connection.sendall(b"p")
            connection.sendall(array.data)
            fill(connection, pulled)
            pulled.max()

        def server_cpu_s() -> float:
            connection.sendall(b"c")
            fill(connection, cpu_s)
            return float(cpu_s[0])

        yield Way(once, server_cpu_s)


def used(answer: Message | bytes) -> None:
    """Read a pulled array where it lies, as a step would."""
    if isinstance(answer, Message):
        for array in answer.arrays:
            array.max()


@contextmanager
def ways(folder: str) -> Iterator[dict[str, Way]]:
    keys = Keys.make()
    array = np.full(SIZE, 1e-3, np.float32)
    push = Message("push", {"step": 1}, (array,))
    with (
        plain_tcp(array) as tcp,
        meshwright(f"ipc://{folder}/a", keys, shared=True, message=push) as shared,
        meshwright(f"ipc://{folder}/b", keys, shared=False, message=push) as encrypted,
        meshwright(f"ipc://{folder}/c", None, shared=False, message=push) as plain,
        pyzmq(f"ipc://{folder}/d", keys, bytes(100)) as least,
        pyzmq(f"ipc://{folder}/g", keys, array.tobytes()) as least_large,
        meshwright(f"ipc://{folder}/e", keys, shared=False, message=SMALL) as small,
        meshwright(f"ipc://{folder}/f", None, shared=False, message=SMALL) as small_plain,
    ):
        found = (tcp, shared, encrypted, least_large, plain, least, small, small_plain)
        yield dict(zip(WANTED, found, strict=True))


def results(
    rounds: list[dict[str, tuple[float, float, float]]], quiet: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each way: the best round's speed, its CPU times, and each round's ratio to TCP."""
    rows = []
    for name, (per_s, ratio) in WANTED.items():
        wall_s, cpu_s, server_s = min(one[name] for one in rounds)
        beside = [one["plain TCP"][0] / one[name][0] for one in rounds]
        rows.append(
            {
                "says": name,
                "per_s": 1 / wall_s,
                "at_least_per_s": per_s,
                "cpu_us": [1e6 * cpu_s, 1e6 * server_s],
                "over_tcp_by_round": [] if "small" in name else beside,
                "at_least_over_tcp": ratio,
                "quiet": quiet,
                "machine": report.machine(),
            }
        )
    return rows


def measured(name: str, way: Way, seconds: float, sides: Sides) -> tuple[float, float, float]:
    """One way in one round; ``sides`` get the CPU time of both of its processes."""
    server_s = way.server_cpu_s()
    with sides.runs(name):
        result = way.measure(seconds)
    sides.cpu_s[name] += way.server_cpu_s() - server_s
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.25, help="for each way in each round")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    quiet, sides = Quiet.wait(dry=arguments.dry), Sides()
    with tempfile.TemporaryDirectory() as folder, ways(folder) as found:
        rounds = [
            {name: measured(name, way, arguments.seconds, sides) for name, way in found.items()}
            for _ in range(arguments.rounds)
        ]
    rows = results(rounds, quiet.record(sides.cpu_s))
    print(report.exchanges_table(rows))
    if not arguments.dry:
        report.save("ps_push_pull", rows)
        report.write_page()


if __name__ == "__main__":
    main()
