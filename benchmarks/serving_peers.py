"""Beside LitServe, BentoML and Ray Serve: one JAX function, the most rows per second at one p99.

``python benchmarks/serving_peers.py --packages FOLDER`` writes ``results/serving_peers.json``; the
folder comes from ``pip install --target FOLDER litserve bentoml "ray[serve]"``. Each server batches
up to 32 rows and pads them to the same sizes. Requests of one row arrive by a Poisson process over
HTTP, whether or not earlier ones were answered. Rates rise by steps, each server in turn, until its
p99 is above the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from quiet import Quiet, Sides
from report import machine, save

FEATURES, WIDTH, MOST = 64, 1024, 32
LIMIT_MS, SECONDS, ROUNDS = 50.0, 4.0, 3
FIRST_RATE, STEP = 100.0, 1.3
COMMON = f"""
import jax, jax.numpy as jnp, numpy as np
FEATURES, WIDTH, MOST = {FEATURES}, {WIDTH}, {MOST}
rng = np.random.default_rng(0)
SIZES = [(FEATURES, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)]
PARAMS = {{f"w{{n}}": (rng.normal(size=s) / s[0] ** 0.5).astype("float32")
          for n, s in enumerate(SIZES)}}

def forward(params, x):
    x = jax.nn.relu(x @ params["w0"])
    return jax.nn.relu(x @ params["w1"]) @ params["w2"]

jitted = jax.jit(forward)
BUCKETS = [1, 2, 4, 8, 16, 32]

def batch(rows):
    rows = np.asarray(rows, "float32")
    size = next(b for b in BUCKETS if b >= len(rows))
    padded = np.concatenate([rows, np.repeat(rows[:1], size - len(rows), 0)])
    return np.asarray(jitted(PARAMS, padded))[: len(rows)]
"""
WARM = """
for size in BUCKETS:
    batch(np.zeros([size, FEATURES]))
"""
OURS = """
import meshwright as mw
from meshwright.serving.http.run import Listening, run
server = mw.Server(forward, params=PARAMS, example=np.zeros([1, FEATURES], "float32"),
                   name="net", buckets=BUCKETS)
run(lambda: mw.serving_app(server), Listening(port=PORT))
"""
LITSERVE = (
    WARM
    + """
import litserve as ls

class Api(ls.LitAPI):
    def setup(self, device):
        for size in BUCKETS:
            batch(np.zeros([size, FEATURES]))
    def decode_request(self, request):
        return np.asarray(request["inputs"][0], "float32")
    def batch(self, inputs):
        return np.stack(inputs)
    def predict(self, x):
        return batch(x)
    def unbatch(self, output):
        return list(output)
    def encode_response(self, output):
        return {"predictions": [output.tolist()]}

if __name__ == "__main__":
    api = Api(max_batch_size=MOST, batch_timeout=0.002, api_path="/invocations")
    ls.LitServer(api, accelerator="cpu", timeout=30).run(
        port=PORT, generate_client_file=False, log_level="warning")
"""
)
BENTOML = """
import bentoml

@bentoml.service(workers=1, traffic={"timeout": 30}, http={"port": PORT})
class Net:
    def __init__(self):
        for size in BUCKETS:
            batch(np.zeros([size, FEATURES]))

    @bentoml.api(batchable=True, max_batch_size=MOST, max_latency_ms=1000, route="/invocations")
    def invocations(self, inputs: np.ndarray) -> np.ndarray:
        return batch(inputs)
"""
RAY_SERVE = """
import time

import ray
from ray import serve

@serve.deployment(max_ongoing_requests=10_000)
class Net:
    def __init__(self):
        for size in BUCKETS:
            batch(np.zeros([size, FEATURES]))

    @serve.batch(max_batch_size=MOST, batch_wait_timeout_s=0.002)
    async def predictions(self, rows):
        return list(batch(rows))

    async def __call__(self, request):
        inputs = (await request.json())["inputs"]
        return {"predictions": [(await self.predictions(inputs[0])).tolist()]}

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT, "access_log": False})
    serve.run(Net.bind(), route_prefix="/invocations")
    time.sleep(1e6)
"""
PROGRAMS = {"ours": OURS, "litserve": LITSERVE, "bentoml": BENTOML, "ray_serve": RAY_SERVE}


class Started(NamedTuple):
    """A server that runs, and leads a session of its own."""

    port: int
    session: int


@contextlib.contextmanager
def started(name: str, folder: Path, packages: str) -> Iterator[Started]:
    """A server that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = folder / f"{name}_service.py"
    program.write_text(f"PORT = {port}\n{COMMON}{PROGRAMS[name]}")
    command = [sys.executable, str(program)]
    if name == "bentoml":
        command = [sys.executable, "-m", "bentoml", "serve", f"{program.stem}:Net"]
        command += ["--port", str(port), "--host", "127.0.0.1"]
    env = {**os.environ, "BENTOML_DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    if name != "ours":
        env["PYTHONPATH"] = packages
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until_s = time.monotonic() + 120
        while asyncio.run(answers(port)) is None:
            assert process.poll() is None, (folder / f"{name}.log").read_text()[-2000:]
            assert time.monotonic() < until_s, (folder / f"{name}.log").read_text()[-2000:]
            time.sleep(0.3)
        yield Started(port, process.pid)
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)


def body_of(rows: np.ndarray) -> bytes:
    body = json.dumps({"inputs": rows.round(4).tolist()}).encode()
    head = f"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


class Connections:
    """Connections to one server that requests share, one at a time each."""

    def __init__(self, port: int) -> None:
        self._port, self._idle = port, list[Any]()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        reader, writer = (
            self._idle.pop()
            if self._idle
            else await asyncio.open_connection("127.0.0.1", self._port)
        )
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "transfer-encoding: chunked" in head:  # as Ray Serve answers
            body = await chunked(reader)
        else:
            length = int(head.partition("content-length:")[2].split()[0])
            body = await reader.readexactly(length)
        if "connection: close" in head:
            writer.close()
        else:
            self._idle.append((reader, writer))
        return int(head.split()[1]), body

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def chunked(reader: asyncio.StreamReader) -> bytes:
    """A body whose chunks each follow their length."""
    body = b""
    while length := int(await reader.readline(), 16):
        body += await reader.readexactly(length)
        await reader.readline()
    await reader.readline()
    return body


async def answers(port: int) -> bytes | None:
    connections = Connections(port)
    try:
        status, body = await connections.ask(body_of(np.ones([1, FEATURES])))
        return body if status == 200 else None
    except (OSError, asyncio.IncompleteReadError):
        return None
    finally:
        connections.close()


async def open_loop(port: int, rows_per_s: float, seed: int) -> dict[str, float]:
    """What requests that arrive at this rate take, from when they were due."""
    rng = np.random.default_rng(seed)
    requests = [body_of(rng.random([1, FEATURES])) for _ in range(64)]
    connections, latencies, failed = Connections(port), list[float](), 0
    under_way = set[asyncio.Task[None]]()

    async def one(request: bytes, due_s: float) -> None:
        nonlocal failed
        try:
            async with asyncio.timeout(10):
                status, _ = await connections.ask(request)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            status = 0
        failed += status != 200
        latencies.append(time.perf_counter() - due_s)

    due_s, end_s = time.perf_counter(), time.perf_counter() + SECONDS
    while (due_s := due_s + rng.exponential(1 / rows_per_s)) < end_s:
        await asyncio.sleep(max(due_s - time.perf_counter(), 0))
        task = asyncio.ensure_future(one(requests[len(latencies) % 64], due_s))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    connections.close()
    p50, p99 = np.percentile(latencies, [50, 99])
    return {
        "rate": rows_per_s,
        "p50_ms": float(1e3 * p50),
        "p99_ms": float(1e3 * p99),
        "failed": failed,
    }


def climb(
    servers: dict[str, Started], seed: int, sides: Sides
) -> dict[str, list[dict[str, float]]]:
    """The rates that each server reached, all servers in turn at each rate.

    One that is above the limit twice in a row climbs no further.
    """
    for server in servers.values():
        asyncio.run(open_loop(server.port, FIRST_RATE / 2, seed))  # warm
    found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    left, rate = set(servers), FIRST_RATE
    while left:
        for name in sorted(left):
            with sides.runs(name, servers[name].session):
                result = asyncio.run(open_loop(servers[name].port, rate, seed))
            found[name].append(result)
            if len(found[name]) > 1 and not any(map(is_within, found[name][-2:])):
                left.discard(name)
            time.sleep(0.3)
        rate *= STEP
    return found


def is_within(step: dict[str, float]) -> bool:
    return step["p99_ms"] <= LIMIT_MS and not step["failed"]


def best(steps: list[dict[str, float]]) -> float:
    """The highest rate within the limit."""
    return max((step["rate"] for step in steps if is_within(step)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", required=True)
    parser.add_argument("--dry", action="store_true", help="do not write the record")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    quiet, sides = Quiet.wait(dry=asked.dry), Sides()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(started(name, Path(folder), asked.packages))
            for name in PROGRAMS
        }
        first = {name: asyncio.run(answers(each.port)) for name, each in servers.items()}
        rounds = [climb(servers, seed, sides) for seed in range(asked.rounds)]
    rates = {name: [best(each[name]) for each in rounds] for name in PROGRAMS}
    medians = {name: float(np.median(found)) for name, found in rates.items()}
    peers = [rate for name, rate in medians.items() if name != "ours"]
    record = {
        "limit_ms": LIMIT_MS,
        "rows_per_s": medians,
        "by_round": rates,
        "ratio_to_best": medians["ours"] / max(*peers, 1e-9),
        "steps": rounds,
        "first_answers": {name: (body or b"").decode()[:80] for name, body in first.items()},
        "quiet": quiet.record(sides.cpu_s),
        "machine": machine(),
    }
    if not asked.dry:
        save("serving_peers", record)
    print(json.dumps({key: record[key] for key in record if key != "steps"}, indent=2))
    for name in PROGRAMS:
        for step in rounds[0][name]:
            print(name, {key: round(value, 2) for key, value in step.items()})


if __name__ == "__main__":
    main()
