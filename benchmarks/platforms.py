"""Files of ``meshwright serve --write``, installed, started and called as users of platforms do.

``python benchmarks/platforms.py [--platforms bentoml mlflow ray litserve]`` trains a small net on
the shipped digits, writes a platform's files for its run, starts them in an environment with what
their ``requirements.txt`` asks for, and compares the answers with the model's own; it writes
``results/platforms.json``. Ray Serve also gets load, and its replicas are watched. LitServe has no
files: ``mw.Server`` stands inside its ``LitAPI``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import report
from environments import Environment, clean_environment
from processes import free_ports
from quiet import Used, load_since

TRAIN = """
import meshwright as mw
import keras
import numpy as np


def build():
    layers = keras.layers
    model = keras.Sequential([
        keras.Input([784], name="image"),
        layers.Dense(128, activation="relu", name="hidden"),
        layers.Dense(10, activation="softmax", name="digit"),
    ], name="digits")
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


if __name__ == "__main__":
    from meshwright.data.datasets import shipped_subset
    shipped = shipped_subset()
    x = shipped.x_train.reshape([-1, 784]).astype("float32") / 255
    y = shipped.y_train.astype("int32")
    strategy = mw.Sharded(mw.create_mesh({"batch": 1}))
    with strategy.scope():
        model = build()
    strategy.fit(model, x[:2048], y[:2048], batch_size=64, verbose=0, checkpoint="runs/digits")
    np.savez("known.npz", x=x[:5], y=model.predict(x[:5], verbose=0))
"""
LITSERVE = """
import litserve
import meshwright as mw
import numpy as np
from train import build


class Api(litserve.LitAPI):
    def setup(self, device):
        self.server = mw.Server(build=build, checkpoint="runs/digits", name="digits")
        self.server.load()

    def decode_request(self, request):
        return np.asarray(request["inputs"], "float32")

    def predict(self, x):
        return self.server.answer({"image": x}).outputs["digit"]

    def encode_response(self, output):
        return {"predictions": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(Api(api_path="/invocations"), accelerator="cpu")
    server.run(host="127.0.0.1", port=PORT, generate_client_file=False, num_api_servers=1)
"""
REPLICAS = """
import time, ray
from ray import serve
ray.init("auto", log_to_driver=False)
while True:
    (deployment,) = serve.status().applications["digits"].deployments.values()
    print("replicas", deployment.replica_states.get("RUNNING", 0), flush=True)
    time.sleep(0.5)
"""
ROOT = Path(__file__).parent.parent
PATIENCE_S, LOOK_EVERY_S, QUIET_S = 600.0, 0.1, 3.0
AGAIN, TOLERANCE = 20, 1e-5
CLIENTS = 100  # at a target of 64 requests under way for each replica: two replicas
BOTH_S = 5  # in which both replicas answer
DOWN_S = 20  # of few requests before Ray takes a replica away, in place of its ten minutes


@dataclasses.dataclass(frozen=True)
class Platform:
    """How a platform starts its files: ``command`` for a port, after ``prepare`` in their folder.

    ``watch`` looks on while many ask; it gets the interpreter, the port and the body of a request.
    """

    package: str
    command: Callable[[int], str]
    prepare: Callable[[Path, int], None] = lambda folder, port: None
    watch: Callable[[Path, int, bytes], dict[str, Any]] = lambda python, port, body: {}


def write_litserve(folder: Path, port: int) -> None:
    (folder / "service.py").write_text(f"PORT = {port}\n{LITSERVE}")


def configure_ray(folder: Path, port: int) -> None:
    """Another port than 8000, and a replica that goes after seconds of few requests."""
    path = folder / "serve_config.yaml"
    text = path.read_text()
    scaling = re.search(r"^( +)target_ongoing_requests: 64\n", text, re.MULTILINE)
    assert scaling is not None, text
    added = f"{scaling[1]}downscale_delay_s: {DOWN_S}\n"
    path.write_text(
        f"http_options:\n  port: {port}\n{text[: scaling.end()]}{added}{text[scaling.end() :]}"
    )


def watch_ray(python: Path, port: int, body: bytes) -> dict[str, Any]:
    """The replicas that run, while many clients ask and after they have gone, by Ray's client."""
    begin_s, seen = time.monotonic(), list[list[float]]()
    command = [python, "-c", REPLICAS]
    with subprocess.Popen(
        command, env=environment_variables(), stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None

        def look_until(wanted: int) -> None:
            for line in client.stdout or ():
                if not line.startswith("replicas "):
                    continue
                now_s, count = time.monotonic() - begin_s, int(line.split()[1])
                if not seen or seen[-1][1] != count:
                    seen.append([round(now_s, 1), count])
                if count == wanted:
                    return
                assert now_s < PATIENCE_S, seen
            raise AssertionError(seen)

        try:
            look_until(1)
            with asking(port, body) as counts:
                look_until(2)
                time.sleep(BOTH_S)
            look_until(1)
        finally:
            client.terminate()
    return {"replicas": seen, "answered_under_load": counts[0], "failed_under_load": counts[1]}


@contextlib.contextmanager
def asking(port: int, body: bytes) -> Iterator[list[int]]:
    """Clients that each ask again as soon as they are answered: how many were, and were not."""
    over, counts, lock = threading.Event(), [0, 0], threading.Lock()

    def client() -> None:
        while not over.is_set():
            failed = predictions(port, body) is None
            with lock:
                counts[failed] += 1

    with ThreadPoolExecutor(CLIENTS) as threads:
        for _ in range(CLIENTS):
            threads.submit(client)
        try:
            yield counts
        finally:
            over.set()


PLATFORMS = {
    "bentoml": Platform(
        "bentoml", lambda port: f"bentoml serve service:Server --host 127.0.0.1 --port {port}"
    ),
    "mlflow": Platform(
        "mlflow-skinny", lambda port: f"mlflow models serve -m . --env-manager local --port {port}"
    ),
    "ray": Platform("ray", lambda port: "serve run serve_config.yaml", configure_ray, watch_ray),
    "litserve": Platform("litserve", lambda port: "python service.py", write_litserve),
}


def measure(name: str) -> dict[str, Any]:
    """What the platform answers, and in which time, with the versions of everything in it."""
    platform = PLATFORMS[name]
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_files(name, folder)
        platform.prepare(folder, port)
        python = environment_of(name, folder).python()
        assert python is not None, f"{name} was not installed"
        before = Used.now()
        time.sleep(QUIET_S)
        others = load_since(before)["other_busy_cores"]
        with np.load(folder / "known.npz") as known:
            x, own = known["x"], known["y"]
        body = json.dumps({"inputs": x.tolist()}).encode()
        command = platform.command(port)
        begin_s = time.monotonic()
        with started(command, folder, python) as said:
            answer = first_answer(port, body, said)
            first_s = time.monotonic() - begin_s
            again = [predictions(port, body) for _ in range(AGAIN)]
            seen = platform.watch(python, port, body)
        assert all(each is not None for each in again)
        assert np.shape(answer) == own.shape
        difference = max(float(np.abs(np.array(each) - own).max()) for each in [answer, *again])
        assert difference <= TOLERANCE, difference
    return {
        "platform": name,
        "started_by": command.replace(str(port), "PORT"),
        "versions": versions(python, platform.package),
        "first_answer_s": first_s,
        "largest_difference": difference,
        **seen,
        "other_busy_cores": others,
        "machine": report.machine(),
    }


def write_files(name: str, folder: Path) -> None:
    """A run of the net in this folder, and the platform's files beside it."""
    (folder / "train.py").write_text(TRAIN)
    run_here([sys.executable, "train.py"], folder)
    if name != "litserve":
        words = ["serve", "runs/digits", "--model", "train:build", "--write", name]
        run_here([sys.executable, "-m", "meshwright", *words], folder)


def run_here(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, env=environment_variables(), check=True)


def environment_variables() -> dict[str, str]:
    """Those of each process; Meshwright is that of this folder, whatever was installed before."""
    return clean_environment() | {
        "PYTHONPATH": str(ROOT / "src"),
        "KERAS_BACKEND": "jax",
        "BENTOML_DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # on a machine that does much else
    }


def environment_of(name: str, folder: Path) -> Environment:
    """What ``requirements.txt`` asks for, but Meshwright from here: it may not be published yet."""
    path = folder / "requirements.txt"
    lines = path.read_text().split("\n") if path.exists() else ["", "litserve>=0.2"]
    packages = [f"meshwright[serve,checkpoint] @ {ROOT.as_uri()}", *filter(None, lines[1:])]
    return Environment(f".venv-{name}", f"MESHWRIGHT_{name.upper()}_PYTHON", tuple(packages))


@contextlib.contextmanager
def started(command: str, folder: Path, python: Path) -> Iterator[Callable[[], str]]:
    """What a process with the programs of an environment says; it ends with all it started.

    Asked once the process has ended, it raises.
    """
    env = environment_variables()
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command.split(), cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True
        )

    def said() -> str:
        assert process.poll() is None, log.read_text()[-3000:]
        return log.read_text()

    try:
        yield said
        said()
    finally:
        process.send_signal(signal.SIGINT)  # as control and C at a terminal
        try:
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def first_answer(port: int, body: bytes, said: Callable[[], str]) -> Any:
    """What is answered as soon as the server is there."""
    until_s = time.monotonic() + PATIENCE_S
    while (found := predictions(port, body)) is None:
        assert time.monotonic() < until_s, said()[-3000:]
        said()
        time.sleep(LOOK_EVERY_S)
    return found


def predictions(port: int, body: bytes) -> Any:
    """What ``/invocations`` answers; ``None`` for a failure."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations", body, {"Content-Type": "application/json"}
    )
    try:
        return json.loads(asked(request))["predictions"]
    except (OSError, http.client.HTTPException):
        return None


def asked(request: Any) -> bytes:
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def versions(python: Path, package: str) -> dict[str, str]:
    """The versions of a platform, and of what computes there."""
    names = [package, "meshwright", "jax", "keras", "numpy"]
    program = (
        f"import importlib.metadata as m, json; print(json.dumps([m.version(n) for n in {names}]))"
    )
    found = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    return dict(zip(names, json.loads(found.stdout), strict=True))


def main() -> None:
    name = Path(__file__).stem
    arguments = report.parser(__doc__, 1, platforms=PLATFORMS).parse_args()
    report.measure_each(
        name, "platform", arguments.platforms, PLATFORMS, measure, report.platforms_table,
        dry=arguments.dry,
    )  # fmt: skip


if __name__ == "__main__":
    main()
