"""What a server of the real engine lives through: restarts, malformed requests, hours of load.

``python benchmarks/serving_endurance.py [starts] [cold] [restarts] [malformed] [soak]
[--soak-minutes 60]`` serves a small Keras model by ``meshwright serve`` and writes
``results/serving_endurance.json``. Clients and malformed requests are those of
``tests/serving/test_http_server.py``; these come from a process of their own, so that they take no
time from the client whose answers are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "serving"))

import numpy as np  # noqa: E402
from quiet import Quiet  # noqa: E402
from report import RESULTS, machine  # noqa: E402
from test_http_server import Load, throw  # noqa: E402

RESTARTS, MALFORMED = 50, 10_000
CLIENTS = 4
TIMES = ("starts", "cold", "restarts", "malformed", "soak")
STARTS = 5
START = """
import json, sys, time
import keras, meshwright as mw
from meshwright.serving import server
begin_s = time.perf_counter()
with mw.Server(sys.argv[1]) as served:
    print(json.dumps(time.perf_counter() - begin_s))
"""


class Served:
    """``meshwright serve`` of a model on a socket that this process holds."""

    def __init__(self, model: Path, bound: socket.socket) -> None:
        self.log = model.with_suffix(".log")
        self.log.write_text("")
        command = [sys.executable, "-m", "meshwright", "serve", str(model), "--buckets", "1,8"]
        command += ["--fd", str(bound.fileno()), "--drain", "0.3"]
        begin_s = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, pass_fds=[bound.fileno()], stderr=log, stdout=log
            )
        while '"listening"' not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        self.start_s = time.monotonic() - begin_s

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def bound_socket() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as bound:
        bound.set_inheritable(True)
        yield bound


def saved_model(folder: Path) -> Path:
    """A model that the clients' requests fit, large enough that its weights would be noticed."""
    import keras

    x = keras.Input([4], name="x")
    y = keras.layers.Dense(3, name="y")(keras.layers.Dense(256, "relu")(x))
    keras.Model(x, y, name="linear").save(folder / "linear.keras")
    return folder / "linear.keras"


def starts(model: Path) -> dict[str, Any]:
    """Seconds from the end of imports until a server of BERT is ready, with what it compiled before
    on disk and without."""
    from serving import bert

    path = model.with_name("bert.keras")
    bert().save(path)

    def start() -> float:
        env = {**os.environ, "MESHWRIGHT_CACHE": str(model.parent / "cache")}
        command = [sys.executable, "-c", START, str(path)]
        return float(subprocess.run(command, env=env, check=True, capture_output=True).stdout)

    first, *later = [start() for _ in range(STARTS)]
    return {"first_ready_s": first, "later_ready_s": float(np.median(later)), "later": later}


def cold(model: Path) -> dict[str, Any]:
    """Seconds from the start of a process until its first answer over HTTP, of a server of BERT.

    Without a cache, and with the one that `meshwright serve --warm-up` fills while the image of a
    container is built; the ways in turn.
    """
    from serving import bert

    path, cache = model.with_name("bert.keras"), model.parent / "warm"
    bert().save(path)
    command = [sys.executable, "-m", "meshwright", "serve", str(path)]
    warm = {**os.environ, "MESHWRIGHT_CACHE": str(cache)}
    subprocess.run([*command, "--warm-up"], env=warm, check=True, capture_output=True)
    ways = {"without_s": {**os.environ, "MESHWRIGHT_CACHE": "off"}, "with_s": warm}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(STARTS):
        for way, env in ways.items():
            found[way].append(_first_answer_s(command, env))
    medians = {way: float(np.median(times)) for way, times in found.items()}
    size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    return {**medians, "all": found, "cache_bytes": size}


def _first_answer_s(command: list[str], env: dict[str, str]) -> float:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    begin_s = time.monotonic()
    served = subprocess.Popen(
        [*command, "--port", str(port)], env=env, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not _answers(port):
            assert served.poll() is None
            time.sleep(0.02)
        return time.monotonic() - begin_s
    finally:
        served.terminate()
        served.wait()


def _answers(port: int) -> bool:
    """Whether the server answers for one row of tokens."""
    body = json.dumps({"inputs": {"ids": [[1] * 64]}}).encode()
    url = f"http://127.0.0.1:{port}/v1/models/bert:predict"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            return answer.status == 200
    except ConnectionError:
        return False
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionError):
            return False
        raise


def restarts(model: Path) -> dict[str, Any]:
    with bound_socket() as bound:
        served = Served(model, bound)
        starts = [served.start_s]
        with Load(bound.getsockname()[1], CLIENTS) as load:
            for _ in range(RESTARTS):
                time.sleep(0.3)
                served.end()
                served = Served(model, bound)
                starts.append(served.start_s)
            time.sleep(0.3)
        served.end()
    lost = {outcome: count for outcome, count in load.outcomes.items() if outcome != "200"}
    return {
        "restarts": RESTARTS,
        "answered": load.outcomes["200"],
        "lost": sum(lost.values()),
        "outcomes": dict(load.outcomes),
        "first_start_s": starts[0],
        "later_start_s": float(np.median(starts[1:])),
    }


def malformed(model: Path) -> dict[str, Any]:
    """The p99 of a client alone, beside as many well-formed requests, and beside malformed ones."""
    with bound_socket() as bound, ProcessPoolExecutor(1, get_context("spawn")) as thrower:
        served, port = Served(model, bound), bound.getsockname()[1]
        with Load(port, 1):
            thrower.submit(throw_all, port, 0, 10).result()
            time.sleep(3)  # warm
        p99_ms, statuses = dict[str, list[float]](), Counter[str]()
        for part in range(10):  # the ways in turn, so that what else runs here meets all of them
            begin, count = part * MALFORMED // 10, MALFORMED // 10
            begin_s = time.monotonic()
            with Load(port, 1) as load:
                statuses += thrower.submit(throw_all, port, begin, count).result()
            took_s = time.monotonic() - begin_s
            assert set(load.outcomes) == {"200"}, load.outcomes
            p99_ms.setdefault("beside_malformed", []).append(_p99_ms(load))
            with Load(port, 1) as load:
                time.sleep(min(took_s, 5.0))
            p99_ms.setdefault("alone", []).append(_p99_ms(load))
            with Load(port, 1) as load, Load(port, 1):
                time.sleep(min(took_s, 5.0))
            p99_ms.setdefault("beside_another_client", []).append(_p99_ms(load))
        assert served.process.poll() is None
        served.end()
    medians = {way: float(np.median(found)) for way, found in p99_ms.items()}
    return {
        "malformed": MALFORMED,
        "deaths": 0,
        "statuses": dict(statuses),
        "p99_ms": medians,
        "ratio_to_alone": medians["beside_malformed"] / medians["alone"],
        "ratio_to_another_client": medians["beside_malformed"] / medians["beside_another_client"],
    }


def throw_all(port: int, begin: int, count: int) -> Counter[str]:
    """The statuses of malformed requests."""
    return Counter(throw(port, seed) for seed in range(begin, begin + count))


def _p99_ms(load: Load) -> float:
    return 1e3 * float(np.percentile(load.seconds, 99))


def soak(model: Path, minutes: float) -> dict[str, Any]:
    """Memory under load; the slope is that of a line through all but the first fifth."""
    times_s, resident = list[float](), list[int]()
    with bound_socket() as bound:
        served, begin_s = Served(model, bound), time.monotonic()
        with Load(bound.getsockname()[1], CLIENTS) as load:
            while (now_s := time.monotonic() - begin_s) < 60 * minutes:
                times_s.append(now_s)
                resident.append(served.resident_bytes())
                load.seconds.clear()  # of this process' memory, too
                time.sleep(1)
        served.end()
    first = len(times_s) // 5
    slope, _ = np.polyfit(times_s[first:], resident[first:], 1)
    level = float(np.median(resident[first:]))
    return {
        "minutes": minutes,
        "answered": load.outcomes["200"],
        "lost": sum(n for outcome, n in load.outcomes.items() if outcome != "200"),
        "outcomes": dict(load.outcomes),
        "resident_bytes": level,
        "grown_share": (np.median(resident[-30:]) - np.median(resident[first : first + 30]))
        / level,
        "slope_share_per_hour": 3600 * slope / level,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("times", nargs="*", choices=[*TIMES, []])
    parser.add_argument("--soak-minutes", type=float, default=60.0)
    parser.add_argument("--dry", action="store_true", help="do not write the record")
    asked = parser.parse_args()
    path = RESULTS / "serving_endurance.json"
    with tempfile.TemporaryDirectory() as folder:
        model, quiet = saved_model(Path(folder)), Quiet.wait(dry=asked.dry)
        for name in asked.times or TIMES:
            found = soak(model, asked.soak_minutes) if name == "soak" else globals()[name](model)
            record = json.loads(path.read_text()) if path.exists() else {}
            record[name] = {**found, "quiet": quiet.record(), "machine": machine()}
            print(name, json.dumps(found, indent=2), flush=True)
            if not asked.dry:
                path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
