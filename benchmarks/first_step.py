"""CPU time of the first step of InceptionV3: on one device, and where its images are split.

    python benchmarks/first_step.py

Each side runs in a process of its own and makes eight virtual devices. CPU time does not depend
much on what others compute. Tracing includes what is done to the traced step, such as the halo
exchanges; the rest is Keras' preparation and the step itself.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections import defaultdict
from typing import Any

from quiet import Quiet

SIZE, ROWS = 136, 4
STAGES = {
    "jaxpr_trace_duration": "tracing",
    "jaxpr_to_mlir_module_duration": "lowering",
    "backend_compile_duration": "XLA",
}
SIDES: dict[str, tuple[dict[str, int], list[str | None] | None]] = {
    "one device": ({"batch": 1}, None),
    "batch=2, rows=4": ({"batch": 2, "rows": 4}, ["batch", "rows", None, None]),
}


def cpu_s() -> float:
    """CPU seconds of this process, all threads together."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measured(side: str) -> dict[str, float]:
    """CPU seconds by stage; each stage ends when JAX says how long it took."""
    import meshwright as mw

    mw.virtual_devices(8)
    import jax
    import keras
    import numpy as np

    axes, inputs = SIDES[side]
    devices = jax.devices()[: 1 if inputs is None else 8]
    strategy = mw.Sharded(mw.create_mesh(axes, devices=devices), inputs=inputs)
    shape: Any = {"weights": None, "input_shape": (SIZE, SIZE, 3), "classes": 10}
    model = keras.applications.InceptionV3(**shape)
    model.compile("sgd", "sparse_categorical_crossentropy")
    images, labels = np.ones((ROWS, SIZE, SIZE, 3), "float32"), np.zeros(ROWS, "int32")
    spent: defaultdict[str, float] = defaultdict(float)
    begin_s = before_s = cpu_s()

    def note(event: str, duration_secs: float, **_: Any) -> None:
        nonlocal before_s
        stage, now_s = STAGES.get(event.rsplit("/", 1)[-1]), cpu_s()
        if stage:
            spent[stage] += now_s - before_s
            before_s = now_s

    jax.monitoring.register_event_duration_secs_listener(note)
    strategy.fit(model, images, labels, batch_size=ROWS, verbose=0)
    total_s = cpu_s() - begin_s
    return {"all": total_s, **spent, "rest": total_s - sum(spent.values())}


def main() -> None:
    """Each side in turn."""
    quiet = Quiet.wait()
    for side in SIDES:
        command = [sys.executable, __file__, side]
        said = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        print(side, ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in said.items()))
    print(quiet.line())


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1]))) if sys.argv[1:] else main()
