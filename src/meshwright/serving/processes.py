"""A model over several processes: rank 0 takes requests, and the others compute with it.

What is computed together must be begun together, in the same order everywhere. So rank 0 says each
batch, with its inputs, to all others before it begins it; they do nothing else. In a model of
stages rank 0 gives each batch to one process after the other, and these answer. The words are JSON
and raw arrays over ZeroMQ, encrypted by keys that rank 0 makes and hands out through JAX's group.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by name from here on
import numpy as np
import zmq

from ..errors import NotReadyError, ProcessError
from .following import shared_text

BEAT_S = 0.5
MISSING_S = 3.0  # without a sign of life; a batch may take longer, for another thread gives it
_WELCOME_S = 60.0

Word = dict[str, Any]
Hear = Callable[[Word, list[np.ndarray]], None]
Do = Callable[[Word, list[np.ndarray], Hear], None]  # with what answers rank 0


class Followers:
    """The other processes, as rank 0 sees them; ``lose`` is called once when one is missing, and
    ``hear`` with what they answer."""

    def __init__(self, lose: Callable[[NotReadyError], None], hear: Hear) -> None:
        self._lose, self._take = lose, hear
        self._context = zmq.Context.instance()
        self._sending = threading.Lock()
        socket_ = self._context.socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        socket_.curve_server, socket_.curve_secretkey = True, secret
        socket_.router_mandatory = True
        socket_.linger = 1000
        port = socket_.bind_to_random_port("tcp://*")
        self._answers = self._context.socket(zmq.PULL)
        self._answers.curve_server, self._answers.curve_secretkey = True, secret
        answers_port = self._answers.bind_to_random_port("tcp://*")
        shared_text(f"{socket.gethostname()} {port} {answers_port} {public.decode()}")
        self._socket = socket_
        self._last_s = dict.fromkeys(range(1, jax.process_count()), 0.0)
        self._names: dict[int, str] = {}
        self._wait_for_all()
        self._closing = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, name="meshwright-followers", daemon=True
        )
        self._watcher.start()
        self._listener = threading.Thread(
            target=self._listen, name="meshwright-answers", daemon=True
        )
        self._listener.start()

    def tell(self, word: Word, arrays: Sequence[np.ndarray] = (), to: int | None = None) -> None:
        """Say a word to all of them, or to one. Raises :class:`NotReadyError` where one is gone."""
        frames = _frames(word, arrays)
        with self._sending:
            for rank in self._last_s if to is None else (to,):
                try:
                    self._socket.send_multipart([str(rank).encode(), *frames])
                except zmq.ZMQError as error:  # its connection is closed: its process has ended
                    self._last_s[rank] = -math.inf
                    raise NotReadyError(
                        f"a process of the model has ended: rank {rank} ({self._names[rank]})."
                    ) from error

    def missing(self) -> str | None:
        """The process that has been silent for too long; ``None`` if there is none."""
        now_s = time.monotonic()
        for rank, seen_s in self._last_s.items():
            if seen_s == -math.inf:
                return f"rank {rank} ({self._names[rank]}) has ended"
            if now_s - seen_s > MISSING_S:
                return (
                    f"rank {rank} ({self._names[rank]}) has not been heard for "
                    f"{now_s - seen_s:.1f} s"
                )
        return None

    def close(self) -> None:
        """Let the others end."""
        self._closing.set()
        self._watcher.join()
        self._listener.join()
        with contextlib.suppress(NotReadyError):
            self.tell({"do": "end"})
        self._socket.close()
        self._answers.close()

    def _wait_for_all(self) -> None:
        until_s = time.monotonic() + _WELCOME_S
        while len(self._names) < len(self._last_s):
            self._hear()
            if time.monotonic() > until_s:
                absent = [str(rank) for rank in self._last_s if rank not in self._names]
                raise ProcessError(
                    f"rank(s) {', '.join(absent)} did not come to serve within {_WELCOME_S:.0f} s. "
                    "Load the same server in every process; all but rank 0 call server.work()."
                )

    def _hear(self) -> None:
        with self._sending:  # a socket belongs to one thread at a time
            while self._socket.poll(0):
                rank, name = self._socket.recv_multipart()
                self._last_s[int(rank)] = time.monotonic()
                self._names[int(rank)] = name.decode()
        time.sleep(0.02)

    def _watch(self) -> None:
        is_lost = False
        while not self._closing.is_set():
            self._hear()
            text = self.missing()
            if text and not is_lost:
                self._lose(NotReadyError(f"a process of the model is missing: {text}."))
            is_lost = text is not None

    def _listen(self) -> None:
        while not self._closing.is_set():
            if self._answers.poll(200):
                self._take(*_parsed(self._answers.recv_multipart()))


def follow(do: Do) -> None:
    """Do what rank 0 says, until it says that this is the end."""
    import os

    host, port, answers_port, key = shared_text("").split()
    host = "127.0.0.1" if host == socket.gethostname() else host
    rank = jax.process_index()
    name = f"host {socket.gethostname()}, pid {os.getpid()}".encode()
    context = zmq.Context.instance()
    connected, answers = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    connected.identity = str(rank).encode()
    for one, its in ((connected, port), (answers, answers_port)):
        one.curve_serverkey = key.encode()
        one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
        one.linger = 0
        one.connect(f"tcp://{host}:{its}")
    answering = threading.Lock()

    def reply(word: Word, arrays: list[np.ndarray]) -> None:
        with answering:  # a socket belongs to one thread at a time
            if not answers.closed:  # which is so once rank 0 has said that this is the end
                answers.send_multipart(_frames(word, arrays))

    local = f"inproc://meshwright-follower-{rank}"
    beats = context.socket(zmq.PULL)
    beats.bind(local)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(local, ended), daemon=True).start()
    words = zmq.Poller()
    words.register(connected, zmq.POLLIN)
    batches = _Doing(do, reply)
    connected.send(name)
    # This thread talks; another one computes, so that a long batch is no silence.
    words.register(beats, zmq.POLLIN)
    try:
        while not batches.is_over:
            ready = dict(words.poll(1000))
            if beats in ready:
                beats.recv()
                connected.send(name)
            if connected in ready:
                batches.add(connected.recv_multipart())
    finally:
        ended.set()
        beats.close()
        connected.close()
    batches.finish()
    answers.close()


class _Doing:
    """The thread that does what rank 0 says, one after the other."""

    def __init__(self, do: Do, reply: Hear) -> None:
        from queue import SimpleQueue

        self._do, self._reply = do, reply
        self._words: Any = SimpleQueue()
        self._error: BaseException | None = None
        self.is_over = False
        self._thread = threading.Thread(target=self._run, name="meshwright-serve", daemon=True)
        self._thread.start()

    def add(self, frames: list[bytes]) -> None:
        self._words.put(frames)

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                word, arrays = _parsed(self._words.get())
                if word["do"] == "end":
                    return
                self._do(word, arrays, self._reply)
        except BaseException as error:
            self._error = error
        finally:
            self.is_over = True


def _frames(word: Word, arrays: Sequence[np.ndarray]) -> list[Any]:
    described = [[str(array.dtype), list(array.shape)] for array in arrays]
    head = json.dumps({**word, "arrays": described}).encode()
    raw = (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays)
    return [head, *raw]


def _parsed(frames: list[bytes]) -> tuple[Word, list[np.ndarray]]:
    head, *data = frames
    word = json.loads(head)
    return word, [
        np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
        for raw, (dtype, shape) in zip(data, word["arrays"], strict=True)
    ]


def _beat(address: str, ended: threading.Event) -> None:
    beats = zmq.Context.instance().socket(zmq.PUSH)
    beats.linger = 0
    beats.connect(address)
    while not ended.wait(BEAT_S):
        beats.send(b"")
    beats.close()
