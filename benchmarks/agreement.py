"""What it costs that processes compare what they are about to do, as a share of their start-up.

    python benchmarks/agreement.py        # about 2 minutes
    python benchmarks/agreement.py --dry

Two processes of one device train one step of a model. Start-up is from the program's first line
to the end of that step. Counted are the facts, gathered a second time (the first time the step is
traced, which compiling it needs as well), and each round of messages as the rank saw it that waited
less. Writes ``benchmarks/results/agreement.json``, but not with ``--dry``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import report
from quiet import Quiet

BEGAN_S = time.perf_counter()
MODELS = ("mlp", "resnet50")
WANTED = 0.01


def main() -> None:
    """Run every model in a group, and print its share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="write no results")
    asked = parser.parse_args()
    quiet = Quiet.wait(dry=asked.dry)
    results = [
        {"model": name, **measured(name), "quiet": quiet.record(), "machine": report.machine()}
        for name in MODELS
    ]
    for result in results:
        is_met = "met" if result["share"] <= WANTED else "missed"
        print(json.dumps({k: v for k, v in result.items() if k != "machine"}), is_met)
    if not asked.dry:
        report.save("agreement", results)


def measured(name: str) -> dict[str, Any]:
    """Start-up, what the comparison takes of it, and the share."""
    from meshwright.launch.group import run_group
    from meshwright.launch.group_options import GroupOptions

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEASURED"] = name
        if run_group([__file__, folder], GroupOptions(2, 1)):
            sys.exit(1)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*"))]
    rounds = zip(*(rank["rounds_s"] for rank in ranks), strict=True)
    took_s = max(rank["facts_s"] for rank in ranks) + sum(map(min, rounds))
    start_s = max(rank["start_s"] for rank in ranks)
    return {"start_s": start_s, "compares_s": took_s, "share": took_s / start_s}


def rank(folder: Path) -> None:
    """One process of the group: train a step, and write down what was measured."""
    from meshwright.launch.agreement import Attendance

    rounds_s, facts_s = list[float](), [0.0]
    agree = Attendance.agree

    def timed(self: Attendance, facts: Mapping[str, str]) -> dict[str, Any]:
        began_s = time.perf_counter()
        answer = agree(self, facts)
        rounds_s.append(time.perf_counter() - began_s)
        return answer

    Attendance.agree = timed
    import keras
    import numpy as np

    import meshwright as mw
    from meshwright.frontends.keras import fitting, steps

    agree_on = steps.agree

    def noted(call: str, facts: Callable[[], Mapping[str, str]]) -> None:
        agree_on(call, facts)
        began_s = time.perf_counter()
        facts()
        facts_s[0] += time.perf_counter() - began_s

    fitting.agree = steps.agree = noted

    class First(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])
            found = {"start_s": time.perf_counter() - BEGAN_S - facts_s[0]}
            found |= {"facts_s": facts_s[0], "rounds_s": rounds_s}
            (folder / f"rank{os.environ['MESHWRIGHT_RANK']}").write_text(json.dumps(found))
            self.model.stop_training = True

    strategy = mw.Sharded(mw.create_mesh({"batch": -1}))
    with strategy.scope():
        if os.environ["MEASURED"] == "mlp":
            layers = [keras.layers.Dense(1024, "relu") for _ in range(2)]
            model = keras.Sequential([keras.Input([784]), *layers, keras.layers.Dense(10)])
        else:
            model = keras.applications.ResNet50(
                weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None
            )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).random([512, *model.input_shape[1:]], "float32")
    strategy.fit(model, x, np.zeros(512, "int32"), batch_size=32, verbose=0, callbacks=[First()])


if __name__ == "__main__":
    if "MEASURED" in os.environ:
        rank(Path(sys.argv[1]))
    else:
        main()
