"""Operations on arrays whose devices belong to two processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from ports import free_port

TWO_PROCESSES = """
import sys, time
import jax, numpy as np
import meshwright as mw
from meshwright import Layout, TopologyError, UNSHARDED as U

me, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", 2, me)

def lies(x, layout, expected):
    assert mw.fetch_layout(x) == layout, (mw.fetch_layout(x), layout)
    starts = dict(zip(layout.mesh.devices, layout.offsets(expected.shape)))
    local = layout.local_dims(expected.shape)
    for device, piece in zip(layout.mesh.local_devices, mw.unpack(x)):
        cut = tuple(slice(s, s + n) for s, n in zip(starts[device], local))
        assert piece.devices() == {device}
        np.testing.assert_array_equal(piece, expected[cut])

mesh = mw.create_mesh({"a": 4, "b": 2})
half = mw.create_mesh({"c": 4}, devices=jax.devices()[2:6])
mine = mw.create_mesh({"c": 4}, devices=jax.local_devices())
mw.barrier(mesh, "start", timeout_s=120)
expected = np.arange(64, dtype=np.float32).reshape(8, 8)
places = [Layout(["a", "b"], mesh), Layout([U, ("b", "a")], mesh), Layout([U, U], mesh),
          Layout(["c", U], half), Layout([U, "c"], mine)]
for source in places:
    x = mw.relayout(expected, source)
    lies(x, source, expected)
    lies(mw.pack(mw.unpack(x), source), source, expected)
    for target in places:
        lies(mw.relayout(x, target), target, expected)
for given in (jax.numpy.asarray(expected), jax.device_put(expected, jax.local_devices()[1])):
    lies(mw.relayout(given, places[0]), places[0], expected)
lies(mw.relayout(np.float32(3), Layout([], mesh)), Layout([], mesh), np.float32(3))
x = mw.relayout(expected, places[0])
lies(jax.grad(lambda t: (mw.relayout(t, places[1]) ** 2).sum())(x), places[0], 2 * expected)
lies(jax.jit(lambda t: mw.relayout(t, places[1]))(x), places[1], expected)
lies(jax.jit(lambda t: t + mw.relayout(expected, places[0]))(x), places[0], 2 * expected)
lies(mw.call_with_layout(jax.numpy.negative, places[1], x), places[1], -expected)
keys = jax.random.split(jax.random.key(0), 8)
moved = mw.relayout(keys, Layout(["a"], mesh))
lies(jax.random.key_data(moved), Layout(["a", U], mesh), np.asarray(jax.random.key_data(keys)))

first = mw.create_mesh({"c": 2}, devices=jax.devices()[:2])
lone = mw.relayout(expected, Layout(["c", U], first))
if me == 1:
    for ask in (lambda: mw.relayout(lone, places[2]), lambda: mw.pack([], ["c"]),
                lambda: mw.barrier(first)):
        try:
            with mw.default_mesh(first):
                ask()
        except TopologyError as error:
            print("refused:", error)
mw.barrier(mesh, "together", timeout_s=60)
try:
    mw.barrier(mesh, f"name {me}", timeout_s=60)
except TopologyError as error:
    print("names:", error)
if me == 0:
    try:
        mw.barrier(mesh, "alone", timeout_s=1)
    except TopologyError as error:
        print("late:", error)
else:
    time.sleep(3)
    mw.barrier(mesh, "alone", timeout_s=60)
mw.barrier(mesh, "end", timeout_s=60)
print("done")
"""


@pytest.mark.full
def test_everything_holds_across_two_processes():
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(me), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for me in range(2)
    ]
    until_s = time.monotonic() + 180
    while time.monotonic() < until_s and {p.poll() for p in processes} >= {None}:
        if any(p.poll() for p in processes):  # the others would wait for the one that failed
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
    answers = [process.communicate() for process in processes]
    for out, err in answers:
        assert out.endswith("done\n"), err[-3000:]
        assert "another process is at a barrier of another name" in out
    assert "'alone' on the mesh" in answers[0][0]
    assert "process 0 still waits for the other processes of the mesh" in answers[0][0]
    assert "process 1 holds no piece of the array" in answers[1][0]
    assert "pack: process 1 has no device of the mesh" in answers[1][0]
    assert "barrier: process 1 has no device of the mesh" in answers[1][0]
