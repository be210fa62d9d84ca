"""The server as a process: it drains, restarts under load, speaks TLS, outlives bad requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_models import Linear, Shelf

from meshwright.errors import CheckpointError, ServingError
from meshwright.serving.http.app import serving_app
from meshwright.serving.http.run import Listening, run

pytestmark = pytest.mark.alone

PROGRAM = Path(__file__).with_name("http_serving.py")
PATH = "/v1/models/linear:predict"
BODY = json.dumps({"instances": [[1, 2, 3, 4]]}).encode()
RESTARTS = int(os.environ.get("MESHWRIGHT_TEST_RESTARTS", "2"))


@contextlib.contextmanager
def listening_socket() -> Iterator[socket.socket]:
    """A socket that stays open while servers come and go, as a supervisor's does."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(2048)
        yield bound


class Started:
    """A server in a process of its own, which listens when this is made."""

    def __init__(self, log: Path, bound: socket.socket | None = None, **how: Any) -> None:
        if bound is not None:
            how["fd"] = bound.fileno()
        with log.open("w") as lines:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), json.dumps(how)],
                stderr=lines,
                pass_fds=[bound.fileno()] if bound is not None else [],
            )
        for _ in range(1200):
            results = [line for line in log.read_text().splitlines() if "listening" in line]
            if results:
                break
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.05)
        self.port = int(json.loads(results[0])["address"].rpartition(":")[2])

    def end(self, sig: int = signal.SIGTERM) -> int:
        self.process.send_signal(sig)
        return self.process.wait(30)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """Starts servers, and ends them with the test."""
    servers: list[Started] = []

    def start(bound: socket.socket | None = None, **how: Any) -> Started:
        how |= {} if bound else {"port": 0}
        servers.append(Started(tmp_path / f"{len(servers)}.log", bound, **how))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def connected(port: int) -> Any:
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30))


class Load:
    """Clients that ask one request after the other, on connections that they keep."""

    def __init__(self, port: int, clients: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()
        self.seconds: list[float] = []
        self._port = port
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with connected(self._port) as connection:
            while not self._ends.is_set():
                start = time.perf_counter()
                try:
                    connection.request("POST", PATH, BODY)
                    answered = connection.getresponse()
                    answered.read()
                except (OSError, http.client.HTTPException) as error:
                    self.outcomes[type(error).__name__] += 1
                    connection.close()
                    continue
                self.outcomes[str(answered.status)] += 1
                self.versions[answered.headers.get("X-Model-Version", "")] += 1
                self.seconds.append(time.perf_counter() - start)


@pytest.mark.full
def test_restarts_under_load_lose_no_request(server):
    with listening_socket() as bound:
        started = server(bound, drain_s=0.3)
        with Load(bound.getsockname()[1], clients=4) as load:
            for _ in range(RESTARTS):
                time.sleep(0.3)
                assert started.end() == 0
                started = server(bound, drain_s=0.3)
            time.sleep(0.3)
        assert started.end() == 0
    assert set(load.outcomes) == {"200"}, load.outcomes
    assert len(load.versions) == RESTARTS + 1
    print(f"{RESTARTS} restarts, {load.outcomes['200']} requests, none lost")


def test_while_it_drains_it_is_not_ready_and_answers(server):
    started = server(drain_s=5.0)
    with connected(started.port) as connection:
        started.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        connection.request("GET", "/v2/health/ready")
        answered = connection.getresponse()
        answered.read()
        assert (answered.status, answered.headers["Connection"]) == (503, "close")
        connection.request("POST", PATH, BODY)
        assert connection.getresponse().status == 200
    started.end()  # the second signal ends it at once


def malformed(seed: int) -> bytes:
    """Bytes that are nearly a request, in one of many ways."""
    rng = random.Random(seed)
    body = bytearray(BODY)
    for _ in range(rng.randrange(1, 6)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    paths = [PATH, "/v2/models/linear/infer", "/invocations", "/v1/models/%00:predict", "/../x"]
    kinds = ["application/json", "text/csv", "application/x-npy", "text/plain", "\x01"]
    headers = [
        f"Content-Type: {rng.choice(kinds)}",
        f"Content-Length: {rng.choice([len(body)] * 6 + [-1, 10**12, 'x', len(body) + 5])}",
        rng.choice(["", "Content-Encoding: gzip", "Content-Encoding: deflate", "Expect: x"]),
        rng.choice(["", "Inference-Header-Content-Length: 7", "Transfer-Encoding: chunked"]),
        rng.choice(["", "X-Request-Timeout: -1", "X-Request-Id: \x02", "Accept: x/y"]),
    ]
    method = rng.choice(["POST"] * 5 + ["GET", "PUT", "BREW", ""])
    head = "\r\n".join(
        [f"{method} {rng.choice(paths)} HTTP/1.1", "Host: x", *filter(None, headers)]
    )
    return head.encode("latin-1") + b"\r\n\r\n" + bytes(body)


def throw(port: int, seed: int) -> str:
    """The status of a malformed request; nothing where the server just closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as there:
        there.sendall(malformed(seed))
        there.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            return there.recv(100).decode("latin-1").partition("\r\n")[0][9:12]
    return ""


@pytest.mark.full
def test_malformed_requests_under_load_hurt_nobody(server):
    count = int(os.environ.get("MESHWRIGHT_TEST_MALFORMED", "300"))
    started = server()
    with Load(started.port, clients=1) as load:
        statuses = Counter(throw(started.port, seed) for seed in range(count))
    assert started.process.poll() is None
    assert set(load.outcomes) == {"200"}, load.outcomes
    wrong = {status for status in statuses if not status.startswith("4")} - {"", "200", "100"}
    assert not wrong, statuses
    assert sum(n for status, n in statuses.items() if status.startswith("4")) > count / 2


def test_an_endless_head_is_cut_off(server):
    started = server()
    there = socket.create_connection(("127.0.0.1", started.port), timeout=10)
    with there, contextlib.suppress(ConnectionError):  # it may close before all is sent
        there.sendall(b"POST / HTTP/1.1\r\n")
        for _ in range(200):
            there.sendall(b"X-A: " + b"a" * 1000 + b"\r\n")
        assert there.recv(100)[9:12] in (b"400", b"")
    assert started.process.poll() is None


@pytest.mark.full
def test_tls_and_keys(server, tmp_path):
    certificate, private_key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        + ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        + ["-keyout", str(private_key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    key = "k" * 32
    files = {"certificate": str(certificate), "private_key": str(private_key)}
    started = server(keys=[key], **files)
    context = ssl.create_default_context(cafile=str(certificate))
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {key}"}, 200)):
        connection = http.client.HTTPSConnection("localhost", started.port, context=context)
        with contextlib.closing(connection):
            connection.request("POST", PATH, BODY, headers)
            assert connection.getresponse().status == status


def test_it_listens_on_loopback_unless_it_is_asked_otherwise():
    assert Listening().host == "127.0.0.1"
    assert Listening().is_local
    assert not Listening(host="0.0.0.0").is_local


def test_a_model_that_does_not_load_is_one_error_without_a_traceback(capfd):
    class Unreadable(Shelf):
        async def start(self) -> None:
            raise CheckpointError("runs/m holds no complete checkpoint.")

    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        run(lambda: serving_app(Unreadable(Linear())), Listening(port=0))
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_an_error_before_anything_is_loaded():
    with listening_socket() as bound:
        taken = Listening(port=bound.getsockname()[1])
        with pytest.raises(ServingError, match="Choose another --port"):
            run(lambda: pytest.fail("it was made"), taken)
    with pytest.raises(ServingError, match="both a certificate and its private key"):
        Listening(certificate=Path("a.pem"))
