"""An hour of training that is late now and then, and never wrong: no alarm may sound.

``python tests/launch/false_alarms.py --minutes 60 --record FILE`` launches two processes with the
limits that they learn by themselves. One of them compiles for 30 s every few minutes while the
other waits, and every 10 s one of the two is stopped for 2 s. It fails where the launcher names a
process as failed, starts the group again, or ends with another exit code than 0.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

STEP_S, COMPILE_S, COMPILE_EVERY_S = 0.05, 30.0, 420.0
PULSE_S, PULSE_EVERY_S = 2.0, 10.0
SLOW = re.compile(r"\bslow|\blate\b|behind", re.IGNORECASE)


def train(folder: Path, seconds: float) -> None:
    """The program of each process; process 1 is the one that compiles for long."""
    import jax
    import jax.numpy as jnp
    import optax

    held_s = [0.0]

    def hold_up(event: str, _duration_s: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            time.sleep(held_s[0])

    jax.monitoring.register_event_duration_secs_listener(hold_up)
    import meshwright as mw

    rank = jax.process_index()
    with (folder / "starts").open("a") as starts:
        starts.write(f"{rank}\n")
    (folder / f"pid{rank}").write_text(str(os.getpid()))

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for number in range(int(seconds / STEP_S)):
            time.sleep(STEP_S)
            if rank == 1 and number % int(COMPILE_EVERY_S / STEP_S) == 600:
                held_s[0] = COMPILE_S
                jax.jit(lambda x, number=number: x * number)(np.ones(7, "f"))
                held_s[0] = 0.0
            yield {"x": np.ones([8, 4], "f"), "y": np.ones([8, 2], "f")}

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    program = mw.jax_program(loss, {"w": np.zeros([4, 2], "f")}, optax.sgd(0.1))
    trainer = mw.Trainer(program, mw.Placement.of(mw.create_mesh({"batch": -1}), {}))
    trainer.train(trainer.init(), batches())


def pulse(launcher: subprocess.Popen[bytes], folder: Path) -> int:
    """Stop one process after the other for a moment until all have ended; the number of stops."""
    draw, stops = random.Random(1), 0
    while launcher.poll() is None:
        time.sleep(PULSE_EVERY_S - PULSE_S)
        pids = [int(path.read_text()) for path in sorted(folder.glob("pid*"))]
        if len(pids) < 2 or launcher.poll() is not None:
            continue
        pid = draw.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PULSE_S)
            os.kill(pid, signal.SIGCONT)
            stops += 1
    return stops


def outcome(folder: Path, minutes: float) -> dict[str, Any]:
    log, begin_s = folder / "launcher.log", time.monotonic()
    command = [sys.executable, "-m", "meshwright.cli", "launch", "--processes", "2"]
    command += [__file__, "--train", str(folder), "--minutes", str(minutes)]
    with log.open("wb") as file:
        launcher = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            stops = pulse(launcher, folder)
        finally:
            launcher.kill()
    if launcher.returncode:
        raise SystemExit(f"exit code {launcher.returncode}\n{log.read_text()}")
    starts = (folder / "starts").read_text().split()
    if sorted(starts) != ["0", "1"]:
        raise SystemExit(f"the processes started {len(starts)} times\n{log.read_text()}")
    return {
        "minutes": (time.monotonic() - begin_s) / 60,
        "steps": int(60 * minutes / STEP_S),
        "stops_of_2_s": stops,
        "compiles_of_30_s": 1 + int((60 * minutes - 600 * STEP_S) // COMPILE_EVERY_S),
        "alarms": 0,
        "named_as_slow": sum(bool(SLOW.search(line)) for line in log.read_text().splitlines()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help="a file of JSON for what came out")
    options = parser.parse_args()
    if options.train:
        train(options.train, 60 * options.minutes)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = outcome(Path(folder), options.minutes)
        print((Path(folder) / "launcher.log").read_text())
    result |= {
        "load": os.getloadavg()[2],
        "cores": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(result, indent=2))
    if options.record:
        options.record.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
