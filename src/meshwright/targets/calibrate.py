"""Measures this machine as virtual CPU devices see it: a few seconds, in a process of its own.

Every figure is that of one device while all devices are at work, since they share cores and
memory. What else runs on the machine is measured along with it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import CompileError, TargetError
from .hardware import Hardware, Link
from .target import Target

# Every call takes about as long, some hundredths of a second: a longer one would be disturbed more.
_ROUNDS = 9
_WIDTH = 256  # of the matrices whose product is timed
_STREAM = 2 << 20  # elements of the array that is streamed; with all devices' more than caches
_IN_CACHE = 16 << 10  # elements of arrays that stay in a core's cache
_REPEATS = 4  # of a piece of work in one call, so that the call itself hardly counts
_SIZES = (1 << 10, 1 << 20)  # elements of the arrays that are reduced
_TINY = 256  # instructions in a row that do next to nothing
_TERMS = 16  # of a polynomial, each a product and a sum
_LEAST_SHARE = 0.5  # of the time of a piece of work, that is not for its instruction
_MOST_REPEATS = 512
_HANDOVERS = 200

# Dims of the arrays whose rates are measured, from small pieces of work to large ones, and the work
# of one call, in which the same is done again and again.
_RATED: dict[str, tuple[list[tuple[int, ...]], float]] = {
    "product": ([(n, n) for n in (32, 128, 256, 512)], 2e8),
    "convolution": ([(1, 8, 8, 16), (1, 16, 16, 32), (16, 16, 16, 32)], 2e8),
    "grouped_convolution": ([(1, 4, 4, 64), (1, 16, 16, 32), (8, 32, 32, 64)], 2e7),
    "arithmetic": ([(1 << 10,), (1 << 14,), (1 << 18,)], 6e7),
    "transcendental": ([(1 << 10,), (1 << 14,), (1 << 18,)], 1e7),
    "memory": ([(1 << 13,), (1 << 17,), (1 << 21,)], 2e8),
}


def calibrate(target: Target | str = "cpu:8", *, timeout_s: float = 300.0) -> Hardware:
    """This machine's numbers for a ``target`` such as ``"cpu:8"``, to estimate steps with.

    The benchmark runs in a process of its own, for ``timeout_s`` at most.

    Keep them with ``Path(...).write_text(hardware.to_toml())``, and read them again with
    :func:`load_hardware`. Raises :class:`~meshwright.TargetError` for a target other than a CPU,
    :class:`~meshwright.CompileError` if the benchmark does not end well.

    >>> machine = calibrate("cpu:2")
    >>> machine.name, machine.peak("float32") > 1e6, machine.link("shared").bytes_per_s > 1e3
    ('cpu:2', True, True)
    """
    target = Target.of(target)
    if target.platform != "cpu":
        raise TargetError(
            f"only CPU targets can be measured here; received {target}. Its published numbers "
            f"are hardware_of({str(target)!r})."
        )
    code = f"from {__name__} import main; main({target.num_devices})"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(target.num_devices),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise CompileError(
            f"measuring {target} took longer than {timeout_s:g} s and was stopped. Give it more "
            "with timeout_s=."
        ) from None
    if done.returncode != 0:
        raise CompileError(f"measuring {target} ended with {done.returncode}.\n{done.stderr}")
    return hardware_from(target, json.loads(done.stdout.splitlines()[-1]))


def hardware_from(target: Target, seconds: dict[str, float]) -> Hardware:
    """The numbers that follow from the seconds that each piece of work took."""
    small, large = seconds["small_sum"], seconds["large_sum"]
    n = target.num_devices
    share = 2 * (n - 1) / n  # of a ring's all-reduce, which the estimate counts with
    more_bytes = 4 * share * (_SIZES[1] - _SIZES[0])
    bytes_per_s = more_bytes / max(large - small, 1e-3 * large) if n > 1 else None
    latency_s = max(0.0, small - (large - small) * _SIZES[0] / (_SIZES[1] - _SIZES[0]))
    names = (
        *("peak_flops_per_s", "memory_bandwidth_bytes_per_s", "elements_per_s"),
        *("instruction_s", "call_s", "handover_s", "rates", "links.shared"),
    )
    rates = _rates(seconds)
    measured = f"mw.calibrate('{target}') on this machine"
    return Hardware(
        name=str(target),
        peak_flops_per_s=(("float32", 2.0 * _WIDTH**3 / seconds["product"]),),
        memory_bandwidth_bytes_per_s=2 * 4 * _STREAM / seconds["stream"],
        links=(Link("shared", "shared", bytes_per_s, latency_s),),
        elements_per_s=_IN_CACHE / seconds["element"],
        instruction_s=seconds["instruction"],
        call_s=seconds.get("nothing"),
        handover_s=seconds.get("handover"),
        rates=rates,
        sources=tuple((name, measured) for name in names),
    )


def _rates(seconds: dict[str, float]) -> tuple[tuple[str, tuple[tuple[float, float], ...]], ...]:
    """Work per second of each kind and size, without what its instruction costs to begin."""
    result: dict[str, list[tuple[float, float]]] = {}
    for name, taken in seconds.items():
        kind, _, size = name.partition(" ")
        if size:
            work_s = max(taken - seconds["instruction"], _LEAST_SHARE * taken)
            result.setdefault(kind, []).append((float(size), float(size) / work_s))
    return tuple((kind, tuple(points)) for kind, points in result.items())


# In the process of its own


def main(num_devices: int) -> None:
    """Print the seconds of each piece of work as JSON; the last line of the output."""
    from ..topology import virtual_devices

    virtual_devices(num_devices)
    print(json.dumps(_measure(num_devices)))


def _measure(num_devices: int) -> dict[str, float]:
    """Seconds of one product, one stream, one elementwise result of an array, one instruction,
    two sums over all devices, a call that does nothing, a hand-over to another thread and, as
    ``"kind size"``, of rated work; rounds alternate, so that a disturbance hits all alike."""
    import jax
    import jax.numpy as jnp

    def product(x: Any) -> Any:
        return _again(lambda y: (x @ y) * (1.0 / _WIDTH), x, _REPEATS)

    def stream(x: Any) -> Any:
        return _again(lambda y: y * 0.5 + 1.0, x, _REPEATS)

    def elements(x: Any) -> Any:
        return _again(lambda y: jnp.tanh(y) * 0.5 + jnp.exp(-y * y), x, 8 * _REPEATS)

    def instructions(x: Any) -> Any:
        for _ in range(_TINY):
            x = jnp.flip(x @ x, 0)
        return x

    def total(x: Any) -> Any:
        return _again(lambda y: jax.lax.psum(y, "all") * (1.0 / num_devices), x, _REPEATS)

    works: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], int]] = {
        "product": (product, (_WIDTH, _WIDTH), _REPEATS),
        "stream": (stream, (_STREAM,), _REPEATS),
        "element": (elements, (_IN_CACHE,), 8 * _REPEATS * 6),  # six operations for each
        "instruction": (instructions, (4, 4), 2 * _TINY),
        "small_sum": (total, (_SIZES[0],), _REPEATS),
        "large_sum": (total, (_SIZES[1],), _REPEATS),
    }
    works |= _rated_works()
    calls = {name: _on_all(work, dims, num_devices) for name, (work, dims, _) in works.items()}
    calls["nothing"] = _on_all(lambda x: x + 1.0, (4, 4), num_devices)
    rounds = [{name: _seconds(call) for name, call in calls.items()} for _ in range(_ROUNDS)]
    least = {name: min(times[name] for times in rounds) for name in calls}  # least disturbed
    taken = {
        name: max(1e-9, (least[name] - least["nothing"]) / runs)
        for name, (_, _, runs) in works.items()
    }
    return {**taken, "nothing": least["nothing"], "handover": _handover_s(calls["product"])}


def _rated_works() -> dict[str, tuple[Callable[[Any], Any], tuple[int, ...], int]]:
    """Pieces of work of each kind and size: what does it, dims, and how often in one call."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def product(y: Any) -> Any:
        return (y @ y) * (4.0 / len(y))  # of 0.25, which it stays

    def convolution(groups: Callable[[int], int]) -> Callable[[Any], Any]:
        def convolve(y: Any) -> Any:
            channels = y.shape[-1]
            dims = (3, 3, channels // groups(channels), channels)
            kernel = np.linspace(0.1, 0.9, math.prod(dims), dtype="float32").reshape(dims)
            kernel *= 2 * channels / kernel.sum() / 9
            return 0.1 + jax.lax.conv_general_dilated(
                y, jnp.asarray(kernel), (1, 1), "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups(channels),
            )  # fmt: skip

        return convolve

    def arithmetic(y: Any) -> Any:
        result = y
        for _ in range(_TERMS):
            result = result * y + 0.2
        return result

    kinds: dict[str, tuple[Callable[[Any], Any], Callable[[tuple[int, ...]], int]]] = {
        "product": (product, lambda dims: 2 * dims[0] ** 3),
        "convolution": (convolution(lambda _: 1), lambda dims: 18 * math.prod(dims) * dims[-1]),
        "grouped_convolution": (convolution(lambda n: n), lambda dims: 18 * math.prod(dims)),
        "arithmetic": (arithmetic, lambda dims: 2 * _TERMS * math.prod(dims)),
        "transcendental": (
            lambda y: jnp.tanh(jnp.exp(-y)), lambda dims: 2 * math.prod(dims)
        ),
        "memory": (lambda y: y * 0.5 + 0.1, lambda dims: 8 * math.prod(dims)),
    }  # fmt: skip
    works: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], int]] = {}
    for kind, (work, size_of) in kinds.items():
        all_dims, in_a_call = _RATED[kind]
        for dims in all_dims:
            size = size_of(dims)
            repeats = min(max(int(in_a_call / size), 2), _MOST_REPEATS)
            again = functools.partial(_again, work, times=repeats)
            works[f"{kind} {size}"] = (again, dims, repeats)
    return works


def _again(work: Callable[[Any], Any], x: Any, times: int) -> Any:
    import jax

    return jax.lax.fori_loop(0, times, lambda _, y: work(y), x)


def _handover_s(call: Callable[[], Any]) -> float:
    """Seconds that a call takes longer in another thread, in the middle of many; a call that is
    over at once would meet threads that do not sleep yet."""
    with ThreadPoolExecutor(1) as thread:
        in_turn = [
            (_seconds(lambda: thread.submit(call).result()), _seconds(call))
            for _ in range(_HANDOVERS)
        ]
    over_there, here = (statistics.median(times) for times in zip(*in_turn, strict=True))
    return max(1e-9, over_there - here)


def _on_all(work: Callable[[Any], Any], dims: tuple[int, ...], n: int) -> Callable[[], Any]:
    """A call that does the work on every device at once, compiled and run once."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((n,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("all")
    x = jax.device_put(jnp.full((n * dims[0], *dims[1:]), 0.25), NamedSharding(mesh, spec))
    mapped = jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped).lower(x).compile()
    jax.block_until_ready(compiled(x))
    return lambda: jax.block_until_ready(compiled(x))


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
