"""A network of unequal layers in two stages: one program with ``lax.switch``, or a jit per device.

    python benchmarks/unequal_stages.py             # about a minute
    python benchmarks/unequal_stages.py --kernel 1 --rows 512     # matrix products instead

Five convolutions of which no two are alike train on two virtual devices, cut at the same layer into
the same micro-batches. One side is ``mw.Pipeline``: a single compiled step in which each device
takes its branch. The other is written by hand: a compiled function per stage and direction, and
``jax.device_put`` between them, so that JAX's own dispatch overlaps the stages. Both keep inputs
alone and compute a stage again for its gradients. Steps are taken in turn. Writes nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from quiet import Quiet, Sides

import meshwright as mw

WIDTHS, SIZE, MICRO_BATCHES = (3, 24, 32, 48, 40, 56), 24, 8
CUT = 2  # layers of the first stage, which takes about half of the FLOPs
RATE = 0.01


def layers(params: Any, x: Any, first: int, end: int) -> Any:
    """Some of the network's layers; the pictures are halved at the third and the fourth. Kernels
    of one by one are matrix products."""
    for number in range(first, end):
        kernel, stride = params[f"conv{number}"], 2 if number in (2, 3) else 1
        if kernel.shape[0] == 1:
            x = jnp.tanh(x[:, ::stride, ::stride] @ kernel[0, 0])
        else:
            dims = ("NHWC", "HWIO", "NHWC")
            strides = (stride, stride)
            made = jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=dims)
            x = jnp.tanh(made)
    return x


def error(y: Any, wanted: Any) -> Any:
    """The loss of one micro-batch."""
    return jnp.mean((y.mean((1, 2)) - wanted) ** 2)


def loss(params: Any, batch: Any) -> Any:
    """The same of the whole network."""
    return error(layers(params, batch["x"], 0, len(WIDTHS) - 1), batch["y"]), {}


def parameters(size: int) -> dict[str, np.ndarray]:
    """Kernels of five layers."""
    draw = np.random.default_rng(0)
    return {
        f"conv{n}": draw.normal(0, 1 / (size * i**0.5), [size, size, i, o]).astype("float32")
        for n, (i, o) in enumerate(itertools.pairwise(WIDTHS))
    }


class OneProgram:
    """A pipeline of stages that differ: ``lax.switch`` in one compiled step."""

    def __init__(self, params: Any, batch: Any) -> None:
        program = mw.jax_program(loss, params, optax.sgd(RATE), batch=batch)
        mesh = mw.create_mesh({"stage": 2}, devices=jax.devices()[:2])
        pipeline = mw.Pipeline("stage", MICRO_BATCHES, cuts=[f"conv{CUT}"])
        placement = mw.Placement.of(mesh, batch=None, unmatched="replicate")
        self._trainer = mw.Trainer(program, placement, mw.StepOptions(pipeline=pipeline))
        self._state, self._batch = self._trainer.init(), self._trainer.put(batch)

    def step(self) -> float:
        self._state, logs = self._trainer.step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return float(logs["loss"])


class ProgramPerDevice:
    """The same by hand: three compiled functions, and transfers between two devices."""

    def __init__(self, params: Any, batch: Any) -> None:
        self._devices = jax.devices()[:2]
        names = list(params)
        own = [{n: params[n] for n in names[:CUT]}, {n: params[n] for n in names[CUT:]}]
        self._params = [jax.device_put(p, d) for p, d in zip(own, self._devices, strict=True)]
        micros = [np.split(batch[name], MICRO_BATCHES) for name in "xy"]
        self._micros = [
            [jax.device_put(micro, device) for micro in of]
            for of, device in zip(micros, self._devices, strict=True)
        ]

        def last(params: Any, sums: Any, x: Any, wanted: Any) -> Any:
            def of(params: Any, x: Any) -> Any:
                return error(layers(params, x, CUT, len(WIDTHS) - 1), wanted) / MICRO_BATCHES

            value, (grads, gradient) = jax.value_and_grad(of, (0, 1))(params, x)
            return value, jax.tree.map(jnp.add, sums, grads), gradient

        def back(params: Any, sums: Any, x: Any, gradient: Any) -> Any:
            _, pull = jax.vjp(lambda params: layers(params, x, 0, CUT), params)
            return jax.tree.map(jnp.add, sums, pull(gradient)[0])

        self._first = jax.jit(lambda params, x: layers(params, x, 0, CUT))
        self._last, self._back = jax.jit(last), jax.jit(back)
        self._update = jax.jit(
            lambda params, sums: jax.tree.map(lambda p, g: p - RATE * g, params, sums)
        )
        self._zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params))

    def step(self) -> float:
        first, last = self._params
        sums, losses, waiting = [self._zeros(first), self._zeros(last)], [], None
        for x, wanted in zip(*self._micros, strict=True):  # one forward, one backward
            sent = jax.device_put(self._first(first, x), self._devices[1])
            value, sums[1], gradient = self._last(last, sums[1], sent, wanted)
            losses.append(value)
            if waiting is not None:
                sums[0] = self._back(first, sums[0], *waiting)
            waiting = x, jax.device_put(gradient, self._devices[0])
        assert waiting is not None
        sums[0] = self._back(first, sums[0], *waiting)
        self._params = [self._update(first, sums[0]), self._update(last, sums[1])]
        jax.block_until_ready(self._params)
        return float(sum(losses))


def main() -> None:
    """Print the steps of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--kernel", type=int, default=3, help="1 for matrix products")
    asked = parser.parse_args()
    mw.virtual_devices(2)
    draw = np.random.default_rng(1)
    sizes = {"x": [asked.rows, SIZE, SIZE, WIDTHS[0]], "y": [asked.rows, WIDTHS[-1]]}
    batch = {name: draw.normal(size=dims).astype("float32") for name, dims in sizes.items()}
    sides = {
        side.__name__: side(parameters(asked.kernel), batch)
        for side in (OneProgram, ProgramPerDevice)
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    quiet, cpu = Quiet.wait(), Sides()
    for number in range(asked.steps + 2):
        losses = []
        for name, side in sides.items():
            begin = time.perf_counter()
            with cpu.runs(name):
                losses.append(side.step())
            if number >= 2:
                seconds[name].append(time.perf_counter() - begin)
        np.testing.assert_allclose(*losses, rtol=1e-5)
    kind = "products" if asked.kernel == 1 else "convolutions"
    print(f"{kind}, {asked.rows} rows, {os.cpu_count()} cores; {quiet.line(cpu.cpu_s)}")
    for name, of in seconds.items():
        print(f"{name:18}{1e3 * statistics.median(of):8.1f} ms, fastest {1e3 * min(of):.1f} ms")
    pairs = zip(*seconds.values(), strict=True)
    print(f"one program takes {statistics.median(a / b for a, b in pairs):.2f} of the other's time")


if __name__ == "__main__":
    main()
