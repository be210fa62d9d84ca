"""Kills, stops, additions and removals in one run, compared with an undisturbed run.

``python tests/launch/chaos.py --faults 60 --seed 1`` prints what was done and what came out, and
fails where a row was missed or repeated, or where the weights differ. ``--on kill,stop`` leaves the
number of processes alone; the weights must then be the same bit for bit. About 17
faults fit into 1500 epochs, so ``--faults 100 --epochs 9000 --record FILE`` takes 20 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
KINDS = ("kill", "stop", "add", "remove")
MOST = 3


def launched(program: str, folder: Path, epochs: int, most: int) -> subprocess.Popen[str]:
    """A launcher of up to so many processes, as many as ``FOLDER/places`` says."""
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\necho localhost:$(cat {folder}/places)\n")
    script.chmod(0o755)
    (folder / "places").write_text(str(min(2, most)))
    (folder / "plan.json").write_text("{}")
    options = ["--processes", f"1:{most}", "--devices", "1", "--stall-timeout", "3"]
    options += ["--host-discovery-script", str(script), "--max-restarts", "50"]
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli", "launch", *options, HERE / program, folder],
        env={**os.environ, "EPOCHS": str(epochs)},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "launcher.log").open("w"),
        text=True,
    )


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class Chaos:
    """Does one thing after another to a run."""

    def __init__(self, folder: Path, seed: int, kinds: tuple[str, ...]) -> None:
        self._folder, self._draw, self._kinds = folder, random.Random(seed), kinds
        self.done: list[str] = []
        self.took_s: list[float] = []  # from a kill to the next step

    def run(self, launcher: subprocess.Popen[str], faults: int) -> None:
        while len(self.done) < faults and launcher.poll() is None:
            known = len(lines(self._folder / "starts"))
            # Mostly after some steps, and now and then while processes are starting.
            time.sleep(self._draw.choice([0.05, 0.3, 0.6, 1.0, 1.5]))
            kind, did_s = self._draw.choice(self._kinds), time.time()
            if not self._do(kind):
                continue
            self.done.append(kind)
            print(f"{time.time():.1f} {kind}", file=sys.stderr, flush=True)
            waits = self._draw.random() < 0.85
            until_s = time.time() + 120
            while waits and len(lines(self._folder / "starts")) == known:
                if launcher.poll() is not None or time.time() > until_s:
                    break
                time.sleep(0.02)
            else:
                if waits and kind == "kill":
                    self.took_s.append(time.time() - did_s)

    def _do(self, kind: str) -> bool:
        places = int((self._folder / "places").read_text())
        if kind in ("add", "remove"):
            expected = places + (1 if kind == "add" else -1)
            if not 1 <= expected <= MOST:
                return False
            new = self._folder / "places.new"
            new.write_text(str(expected))
            new.replace(self._folder / "places")
            return True
        pids = [int(p.read_text() or 0) for p in sorted((self._folder / "pids").iterdir())]
        alive = [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]
        if not alive:
            return False
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._draw.choice(alive), number)
            return True
        return False


def result(folder: Path, epochs: int) -> dict[str, Any]:
    output = json.loads((folder / "result.json").read_text())
    wrong = [row for row, visits in enumerate(output["visits"]) if visits != epochs]
    if wrong:
        raise SystemExit(f"rows {wrong[:9]} were trained on {output['visits'][wrong[0]]} times.")
    return output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", default="rows_once.py", help="or fit_rows_once.py")
    parser.add_argument("--on", default=",".join(KINDS))
    parser.add_argument("--record", type=Path, help="a file of JSON for what came out")
    options = parser.parse_args()
    kinds = tuple(options.on.split(","))
    same_mesh = not {"add", "remove"} & set(kinds)
    most = 2 if same_mesh else MOST
    with tempfile.TemporaryDirectory() as calm, tempfile.TemporaryDirectory() as wild:
        if launched(options.program, Path(calm), options.epochs, 2).wait():
            raise SystemExit((Path(calm) / "launcher.log").read_text())
        undisturbed = result(Path(calm), options.epochs)
        launcher, chaos = (
            launched(options.program, Path(wild), options.epochs, most),
            Chaos(Path(wild), options.seed, kinds),
        )
        try:
            while not (Path(wild) / "starts").exists() and launcher.poll() is None:
                time.sleep(0.05)
            chaos.run(launcher, options.faults)
            code = launcher.wait(600)
        finally:
            launcher.kill()
        log = (Path(wild) / "launcher.log").read_text()
        print(f"done: {' '.join(chaos.done)}")
        if code or not (Path(wild) / "result.json").exists():
            raise SystemExit(f"exit code {code}\n{log}")
        actual = result(Path(wild), options.epochs)
        starts = [json.loads(line)["processes"] for line in lines(Path(wild) / "starts")]
    counts = {kind: chaos.done.count(kind) for kind in kinds}
    print(f"{len(chaos.done)} faults {counts}, {len(starts)} starts with {starts} processes")
    if chaos.took_s:
        took = sorted(chaos.took_s)
        print(
            f"kill to next step: median {statistics.median(took):.1f} s, longest {took[-1]:.1f} s"
        )
    weights, others = (np.concatenate(f["weights"]) for f in (actual, undisturbed))
    apart = max(np.abs(np.subtract(actual["losses"], undisturbed["losses"])))
    print(
        f"every row once in each of {options.epochs} epochs; losses differ by {apart:.1e} at most"
    )
    print(f"weights differ by {np.abs(weights - others).max():.1e} at most")
    if options.record:
        outcome = {
            "faults": counts,
            "epochs": options.epochs,
            "starts": len(starts),
            "processes": [min(starts), max(starts)],
            "kill_to_step_s": [statistics.median(chaos.took_s), max(chaos.took_s)],
            "kills_timed": len(chaos.took_s),
            "losses_apart": float(apart),
            "weights_apart": float(np.abs(weights - others).max()),
            "other_load": os.getloadavg()[1],
            "cores": os.cpu_count(),
            "date": datetime.date.today().isoformat(),
        }
        options.record.write_text(json.dumps(outcome, indent=2) + "\n")
    if apart > (0 if same_mesh else 2e-6):
        raise SystemExit("the losses differ")
    if same_mesh and not np.array_equal(weights, others):
        raise SystemExit("the weights differ")


if __name__ == "__main__":
    main()
