"""Measures this machine as its devices see it, virtual CPU devices or accelerators, in some seconds
and in a process of its own.

Every figure is that of one device while all devices are at work, since they may share cores and
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
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import CompileError, TargetError
from .hardware import Hardware, Link, hardware_of, hardware_of_device
from .target import Target

# Every call takes about as long, some hundredths of a second: a longer one would be disturbed more.
_ROUNDS = 8
_REPEATS = 4  # of a piece of work in one call, so that the call itself hardly counts
_SIZES = (1 << 10, 1 << 20)  # elements of the arrays that are reduced
_TINY = 256  # instructions in a row that do next to nothing
_TERMS = 16  # of a polynomial, each a product and a sum
_LEAST_SHARE = 0.5  # of the time of a piece of work, that is not for its instruction
_MOST_REPEATS = 512
_HANDOVERS = 100
_Dims = tuple[int, ...]


@dataclass(frozen=True)
class _Amounts:
    """How much work is timed: what keeps a core busy, an accelerator hardly notices.

    ``width`` is that of the matrices of a product, ``stream`` the elements of an array that is
    streamed (with all devices' more than caches hold), ``in_cache`` those of arrays that stay in a
    cache. ``rated`` has, of each kind of work, dims of arrays from small to large, and the work of
    one call, in which the same is done again and again.
    """

    width: int
    stream: int
    in_cache: int
    rated: dict[str, tuple[list[_Dims], float]]


_OF_CORES = _Amounts(
    256,
    2 << 20,
    16 << 10,
    {
        "product": ([(n, n) for n in (32, 128, 512)], 1e8),
        "product_skinny": ([(8, 256), (64, 768)], 1e8),
        "product_transposed": ([(32, 128), (64, 512), (128, 768)], 1e8),
        "convolution": ([(1, 8, 8, 16), (1, 16, 16, 32), (16, 16, 16, 32)], 2e8),
        "grouped_convolution": ([(1, 4, 4, 64), (1, 16, 16, 32), (8, 32, 32, 64)], 2e7),
        "arithmetic": ([(1 << 10,), (1 << 14,), (1 << 18,)], 6e7),
        "transcendental": ([(1 << 10,), (1 << 14,), (1 << 18,)], 1e7),
        "memory": ([(1 << 13,), (1 << 17,), (1 << 21,)], 2e8),
    },
)
_PRODUCTS = ([(n, n) for n in (128, 512, 2048, 8192)], 4e12)
_CONVOLUTIONS = ([(8, 14, 14, 64), (32, 28, 28, 128), (128, 56, 56, 128)], 5e11)
_OF_ACCELERATORS = _Amounts(
    4096,
    256 << 20,
    4 << 20,
    {
        "product": _PRODUCTS,
        "product_bfloat16": _PRODUCTS,
        "convolution": _CONVOLUTIONS,
        "convolution_bfloat16": _CONVOLUTIONS,
        "grouped_convolution": ([(8, 14, 14, 64), (32, 56, 56, 64), (128, 112, 112, 64)], 2e10),
        "arithmetic": ([(1 << 14,), (1 << 20,), (1 << 26,)], 3e10),
        "transcendental": ([(1 << 14,), (1 << 20,), (1 << 26,)], 5e9),
        "memory": ([(1 << 14,), (1 << 20,), (1 << 24,), (1 << 28,)], 2e10),
    },
)


def calibrate(target: Target | str = "cpu:8", *, timeout_s: float = 300.0) -> Hardware:
    """This machine's numbers for a ``target`` such as ``"cpu:8"`` or ``"h100:1"``, to estimate by.

    A GPU or TPU target needs as many devices of its kind here, which nothing else should use
    meanwhile; the rates that are measured count before published ones, and what is not measured,
    such as links and memory, stays as published. The benchmark runs in a process of its own, for
    ``timeout_s`` at most.

    Keep the numbers with ``Path(...).write_text(hardware.to_toml())``, and read them again with
    :func:`load_hardware`, on any machine. Raises :class:`~meshwright.TargetError` for devices that
    are not here, :class:`~meshwright.CompileError` if the benchmark does not end well.

    >>> machine = calibrate("cpu:2")
    >>> machine.name, machine.peak("float32") > 1e6, machine.link("shared").bytes_per_s > 1e3
    ('cpu:2', True, True)
    """
    target = Target.of(target)
    code = f"from {__name__} import main; main({str(target)!r})"
    environment = dict(os.environ)
    if target.platform == "cpu":
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(target.num_devices)}
    else:
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # others may hold memory, too
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
    answer = json.loads(done.stdout.splitlines()[-1])
    if "devices" in answer:
        raise TargetError(
            f"{target} cannot be measured here: JAX has {answer['devices']}. On such a machine, "
            f"`meshwright calibrate --target {target} --save FILE` measures it; --hardware FILE, "
            "or mw.load_hardware, reads that file anywhere. Published numbers are in "
            f"mw.hardware_of({str(target)!r})."
        )
    return hardware_from(target, answer)


def hardware_from(target: Target, seconds: dict[str, float]) -> Hardware:
    """The numbers that follow from the seconds that each piece of work took."""
    measured = {
        "instruction_s": seconds["instruction"],
        "call_s": seconds.get("nothing"),
        "handover_s": seconds.get("handover"),
        "rates": _rates(seconds),
    }
    if target.platform == "cpu":
        measured |= _of_cores(target, seconds)
    published = hardware_of(target)
    names = ("links.shared" if name == "links" else name for name in measured)
    sources = dict.fromkeys(names, f"mw.calibrate('{target}') on this machine")
    return replace(
        published,
        name=str(target),
        sources=tuple((dict(published.sources) | sources).items()),
        **measured,
    )


def _of_cores(target: Target, seconds: dict[str, float]) -> dict[str, Any]:
    """What is published of accelerators: peaks, bandwidth, and the one link, memory."""
    small, large = seconds["small_sum"], seconds["large_sum"]
    n = target.num_devices
    share = 2 * (n - 1) / n  # of a ring's all-reduce, which the estimate counts with
    more_bytes = 4 * share * (_SIZES[1] - _SIZES[0])
    bytes_per_s = more_bytes / max(large - small, 1e-3 * large) if n > 1 else None
    latency_s = max(0.0, small - (large - small) * _SIZES[0] / (_SIZES[1] - _SIZES[0]))
    return {
        "peak_flops_per_s": (("float32", 2.0 * _OF_CORES.width**3 / seconds["product"]),),
        "memory_bandwidth_bytes_per_s": 2 * 4 * _OF_CORES.stream / seconds["stream"],
        "links": (Link("shared", "shared", bytes_per_s, latency_s),),
        "elements_per_s": _OF_CORES.in_cache / seconds["element"],
    }


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


def main(target: str) -> None:
    """Print the seconds of each piece of work as JSON, the last line of the output; or, where the
    target is not here, the ``devices`` that are."""
    from ..topology import virtual_devices

    asked = Target.of(target)
    if asked.platform == "cpu":
        virtual_devices(asked.num_devices)
    elif others := _other_devices(asked):
        print(json.dumps({"devices": others}))
        return
    amounts = _OF_CORES if asked.platform == "cpu" else _OF_ACCELERATORS
    print(json.dumps(_measure(asked.num_devices, amounts)))


def _other_devices(target: Target) -> str:
    """The devices that are here, in words, unless they are as many of the target's kind."""
    kinds = [device.device_kind for device in jax.local_devices()]
    same = {getattr(hardware_of_device(kind), "name", None) for kind in kinds} == {target.kind}
    return "" if same and len(kinds) >= target.num_devices else f"{len(kinds)} x {kinds[0]}"


def _measure(num_devices: int, amounts: _Amounts) -> dict[str, float]:
    """Seconds of one product, one stream, one elementwise result of an array, one instruction,
    two sums over all devices, a call that does nothing, a hand-over to another thread and, as
    ``"kind size"``, of rated work; rounds alternate, so that a disturbance hits all alike."""

    def product(x: Any) -> Any:
        return _again(lambda y: (x @ y) * (1.0 / amounts.width), x, _REPEATS)

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

    works: dict[str, tuple[Callable[[Any], Any], _Dims, int]] = {
        "product": (product, (amounts.width, amounts.width), _REPEATS),
        "stream": (stream, (amounts.stream,), _REPEATS),
        "element": (elements, (amounts.in_cache,), 8 * _REPEATS * 6),  # six operations for each
        "instruction": (instructions, (4, 4), 2 * _TINY),
        "small_sum": (total, (_SIZES[0],), _REPEATS),
        "large_sum": (total, (_SIZES[1],), _REPEATS),
    }
    works |= _rated_works(amounts)
    works["nothing"] = (lambda x: x + 1.0, (4, 4), 1)
    with ThreadPoolExecutor() as threads:  # compilers use one core for most of the time
        dtypes = ("bfloat16" if "bfloat16" in name else "float32" for name in works)
        starts = [
            threads.submit(_on_all, work, dims, dtype, num_devices)
            for (work, dims, _), dtype in zip(works.values(), dtypes, strict=True)
        ]
        calls = {name: start.result() for name, start in zip(works, starts, strict=True)}
    rounds = [{name: _seconds(call) for name, call in calls.items()} for _ in range(_ROUNDS)]
    least = {name: min(times[name] for times in rounds) for name in calls}  # least disturbed
    taken = {
        name: max(1e-9, (least[name] - least["nothing"]) / runs)
        for name, (_, _, runs) in works.items()
    }
    return {**taken, "nothing": least["nothing"], "handover": handover_s(calls["stream"])}


def _rated_works(amounts: _Amounts) -> dict[str, tuple[Callable[[Any], Any], _Dims, int]]:
    """Pieces of work of each kind and size: what does it, dims, and how often in one call."""

    def product(y: Any) -> Any:
        return (y @ y) * (4.0 / len(y))  # of 0.25, which it stays

    def skinny(y: Any) -> Any:
        n = y.shape[-1]
        weights = np.linspace(0.1, 0.9, n * n, dtype="float32").reshape(n, n)
        return y @ jnp.asarray(weights * (2 / n))

    def transposed(y: Any) -> Any:
        products = jax.lax.dot_general(y, y, (((0,), (0,)), ((), ())))
        return y + 1e-6 * jnp.min(products)  # which needs all of them

    def convolution(groups: Callable[[int], int]) -> Callable[[Any], Any]:
        def convolve(y: Any) -> Any:
            channels = y.shape[-1]
            dims = (3, 3, channels // groups(channels), channels)
            kernel = np.linspace(0.1, 0.9, math.prod(dims), dtype="float32").reshape(dims)
            kernel *= 2 * channels / kernel.sum() / 9
            return 0.1 + jax.lax.conv_general_dilated(
                y, jnp.asarray(kernel, y.dtype), (1, 1), "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups(channels),
            )  # fmt: skip

        return convolve

    def arithmetic(y: Any) -> Any:
        result = y
        for _ in range(_TERMS):
            result = result * y + 0.2
        return result

    kinds: dict[str, tuple[Callable[[Any], Any], Callable[[_Dims], int]]] = {
        "product": (product, lambda dims: 2 * dims[0] ** 3),
        "product_skinny": (skinny, lambda dims: 2 * math.prod(dims) * dims[1]),
        "product_transposed": (transposed, lambda dims: 2 * math.prod(dims) * dims[1]),
        "convolution": (convolution(lambda _: 1), lambda dims: 18 * math.prod(dims) * dims[-1]),
        "grouped_convolution": (convolution(lambda n: n), lambda dims: 18 * math.prod(dims)),
        "arithmetic": (arithmetic, lambda dims: 2 * _TERMS * math.prod(dims)),
        "transcendental": (
            lambda y: jnp.tanh(jnp.exp(-y)), lambda dims: 2 * math.prod(dims)
        ),
        "memory": (lambda y: y * 0.5 + 0.1, lambda dims: 8 * math.prod(dims)),
    }  # fmt: skip
    works: dict[str, tuple[Callable[[Any], Any], _Dims, int]] = {}
    for name, (all_dims, in_a_call) in amounts.rated.items():
        work, size_of = kinds[name.removesuffix("_bfloat16")]
        for dims in all_dims:
            size = size_of(dims)
            repeats = min(max(int(in_a_call / size), 2), _MOST_REPEATS)
            again = functools.partial(_again, work, times=repeats)
            works[f"{name} {size}"] = (again, dims, repeats)
    return works


def _again(work: Callable[[Any], Any], x: Any, times: int) -> Any:
    return jax.lax.fori_loop(0, times, lambda _, y: work(y), x)


def handover_s(call: Callable[[], Any], times: int = _HANDOVERS) -> float:
    """Seconds until another thread begins a call, and until this one has its result, in the middle
    of many.

    A call that is over at once would meet threads that do not sleep yet, and one that reads little
    would leave in the caches what Python needs on the way. The call itself does not count: where
    other work is on the machine, its times differ by more than a hand-over takes.
    """

    def timed() -> tuple[float, float]:
        begin_s = time.perf_counter()
        call()
        return begin_s, time.perf_counter()

    def handed_over(thread: ThreadPoolExecutor) -> float:
        asked_s = time.perf_counter()
        begin_s, end_s = thread.submit(timed).result()
        return begin_s - asked_s + time.perf_counter() - end_s

    with ThreadPoolExecutor(1) as thread:
        return statistics.median(handed_over(thread) for _ in range(times))


def _on_all(work: Callable[[Any], Any], dims: _Dims, dtype: str, n: int) -> Callable[[], Any]:
    """A call that does the work on every device at once, compiled and run once."""
    mesh = jax.make_mesh(
        (n,), ("all",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.local_devices()[:n]
    )
    spec = PartitionSpec("all")
    x = jax.device_put(jnp.full((n * dims[0], *dims[1:]), 0.25, dtype), NamedSharding(mesh, spec))
    mapped = jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped).lower(x).compile()
    jax.block_until_ready(compiled(x))
    return lambda: jax.block_until_ready(compiled(x))


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
