"""Devices of this process, and a CPU pool that is large enough for their collectives.

Almost every test here needs a process that has not started JAX yet.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

import meshwright as mw
from meshwright import MeshwrightError, TopologyError, topology
from meshwright.testing import run_in_fresh_process

THREADS_ARE_SEEN = Path("/proc/self/task").is_dir()
sees_threads = pytest.mark.skipif(
    not THREADS_ARE_SEEN, reason="only Linux shows the names of threads"
)

# XLA takes the size of the pool from NPROC, so this stands for two cores on any machine.
TWO_CORES = {"NPROC": "2", "JAX_PLATFORMS": "cpu"}
FLAG = "--xla_force_host_platform_device_count=8"

# Every way to ask for devices: what the environment holds, and how the program begins.
WAYS = {
    "virtual_devices": (
        {},
        "import meshwright as mw; mw.virtual_devices(8)",
    ),
    "JAX_NUM_CPU_DEVICES before the import": (
        {"JAX_NUM_CPU_DEVICES": "8"},
        "import meshwright as mw",
    ),
    "XLA_FLAGS before the import": (
        {"XLA_FLAGS": FLAG},
        "import jax; import meshwright as mw",
    ),
    "jax.config before the import": (
        {},
        "import jax; jax.config.update('jax_num_cpu_devices', 8); import meshwright as mw",
    ),
    "jax.config after the import and before create_mesh": (
        {},
        "import meshwright as mw; import jax; jax.config.update('jax_num_cpu_devices', 8)",
    ),
}

# Two matrices split over the second axis, the batch over the first: gradients and activations are
# summed over the devices at every step, the state is donated, and nothing waits until the end.
TRAINING = """
import functools, jax, jax.numpy as jnp, pathlib, warnings

warnings.simplefilter("error", mw.MeshwrightWarning)
mesh = mw.create_mesh({{"batch": -1, "model": 2}})
assert mesh.size == {devices}

def put(layout, *dims):
    layout = mw.Layout(layout, mesh)
    return jax.device_put(jnp.linspace(-0.1, 0.1, dims[0] * dims[1]).reshape(dims), layout.sharding)

weights = {{"a": put([None, "model"], 32, 64), "b": put(["model", None], 64, 10)}}
x, y = put(["batch", None], 64, 32), put(["batch", None], 64, 10)

def loss_of(weights, x, y):
    return jnp.mean((jnp.tanh(x @ weights["a"]) @ weights["b"] - y) ** 2)

@functools.partial(jax.jit, donate_argnums=0)
def step(weights, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

assert " all-reduce" in step.lower(weights, x, y).compile().as_text()
first = last = None
for _ in range({steps}):
    weights, last = step(weights, x, y)
    first = last if first is None else first
threads = [(task / "comm").read_text() for task in pathlib.Path("/proc/self/task").glob("*")]
print(float(last) < float(first), sum("tf_XLAEigen" in name for name in threads))
"""


def trains(begin: str, env: dict[str, str], devices: int = 8, steps: int = 2000) -> bool:
    code = begin + "\n" + TRAINING.format(devices=devices, steps=steps)
    learned, threads = run_in_fresh_process(code, env={**TWO_CORES, **env}).split()
    return learned == "True" and (int(threads) >= 2 * devices or not THREADS_ARE_SEEN)


# The pool


@pytest.mark.full
@pytest.mark.parametrize("devices", [8, 16])
def test_2000_unblocked_steps_with_collectives_run_on_two_cores(devices):
    assert trains(f"import meshwright as mw; mw.virtual_devices({devices})", {}, devices)


@pytest.mark.full
@pytest.mark.parametrize(("env", "begin"), list(WAYS.values())[1:], ids=list(WAYS)[1:])
def test_and_so_they_do_however_the_devices_were_asked_for(env, begin):
    # Without the larger pool a program of this kind stands still before its 50th step.
    assert trains(begin, env, steps=300)


@pytest.mark.full
@pytest.mark.parametrize(("env", "begin"), list(WAYS.values())[1:], ids=list(WAYS)[1:])
def test_and_for_2000_steps_as_well(env, begin):
    assert trains(begin, env)


@sees_threads
def test_where_nothing_can_be_done_any_more_a_warning_says_what_to_do():
    out = run_in_fresh_process(
        """
        import jax, warnings
        jax.devices()
        import meshwright as mw
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mw.create_mesh({"a": 2}, devices=jax.devices()[:2])
            mw.create_mesh({"a": 1}, devices=jax.devices()[:1])
            mesh = mw.create_mesh({"batch": 8})
        for each in caught:
            print(each.category.__name__, each.filename, each.message)
        print(mesh)
        """,
        env={**TWO_CORES, "JAX_NUM_CPU_DEVICES": "8"},
    )
    warning, mesh = out.splitlines()
    assert warning == (
        "MeshwrightWarning <string> 8 CPU devices share a pool of 8 threads: a training loop that "
        "does not block at every step can lock up in a collective and abort. Call "
        "meshwright.virtual_devices(8) before JAX is first used, or start the program with "
        "NPROC=16."
    )
    assert mesh == "batch=8 @ cpu:0-7"


def nproc_after(begin: str, env: dict[str, str]) -> str:
    code = f"{begin}\nimport os; print(os.environ.get('NPROC'))"
    return run_in_fresh_process(code, env=env).strip()


@pytest.mark.full
def test_a_larger_pool_that_the_user_asks_for_is_kept():
    begin = "import meshwright as mw; mw.virtual_devices(4)"
    plenty = str(64 + (os.cpu_count() or 1))
    assert nproc_after(begin, {"NPROC": plenty}) == plenty
    assert nproc_after(begin, {"NPROC": "many"}) == str(max(8, os.cpu_count() or 1))


def test_where_there_is_one_device_the_pool_is_left_alone():
    assert nproc_after("import meshwright", {}) == "None"
    assert nproc_after("import meshwright", {"JAX_NUM_CPU_DEVICES": "1"}) == "None"
    assert nproc_after("import meshwright", {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}) == (
        "None"
    )


def test_of_several_device_counts_among_the_flags_the_largest_rules():
    flags = f"{FLAG}0 {FLAG}"
    assert nproc_after("import meshwright", {"XLA_FLAGS": flags}) == (
        str(max(160, os.cpu_count() or 1))
    )


# virtual_devices


@pytest.mark.parametrize("count", [0, -1, 2.0, "8", None, True])
def test_a_count_that_is_none_is_an_error(count):
    with pytest.raises(
        TopologyError, match="the count must be a whole number, at least 1"
    ) as error:
        mw.virtual_devices(count)
    assert f"virtual_devices({count!r})" in str(error.value)
    assert isinstance(error.value, MeshwrightError)


def test_a_call_after_the_client_exists_is_an_error_that_says_so():
    jax.devices()
    with pytest.raises(TopologyError) as error:
        mw.virtual_devices(4)
    assert str(error.value) == (
        "virtual_devices(4) comes too late: JAX has already created its 8 cpu device(s), and they "
        "cannot be changed in this process. Call it before the first use of JAX, or set the "
        "environment variable JAX_NUM_CPU_DEVICES=4 before the program starts."
    )
    assert len(jax.devices()) == 8


def test_a_cell_of_a_notebook_may_make_the_same_devices_again():
    jax.devices()
    mw.virtual_devices(8)
    assert len(jax.devices()) == 8


def test_before_the_client_exists_the_last_call_counts_and_importing_jax_does_no_harm():
    out = run_in_fresh_process(
        """
        import jax, jax.numpy, numpy
        import meshwright as mw
        from meshwright._compat import jax_is_running
        mw.virtual_devices(2)
        mw.virtual_devices(numpy.int64(6))
        print(jax_is_running(), jax.device_count(), jax.default_backend(), jax_is_running())
        """
    )
    assert out == "False 6 cpu True\n"


def test_it_beats_the_flag_of_xla_and_the_variable_of_jax():
    begin = "import meshwright as mw; mw.virtual_devices(2); import jax; print(jax.device_count())"
    assert run_in_fresh_process(begin, env={"XLA_FLAGS": FLAG}) == "2\n"
    assert run_in_fresh_process(begin, env={"JAX_NUM_CPU_DEVICES": "8"}) == "2\n"


@pytest.mark.full
def test_a_platform_that_the_user_chose_stays_chosen():
    code = """
        import jax
        {choose}
        import meshwright as mw
        mw.virtual_devices(2)
        print(jax.config.jax_platforms)
    """
    by_code = code.format(choose="jax.config.update('jax_platforms', 'cuda,cpu')")
    assert run_in_fresh_process(by_code, env={"JAX_PLATFORMS": ""}) == "cuda,cpu\n"
    by_variable = code.format(choose="")
    assert run_in_fresh_process(by_variable, env={"JAX_PLATFORMS": "tpu,cpu"}) == "tpu,cpu\n"
    assert run_in_fresh_process(by_variable, env={"JAX_PLATFORMS": ""}) == "cpu\n"


# Asking for devices


def test_devices_are_those_of_jax():
    assert topology.devices() == topology.devices("cpu") == jax.devices()
    assert topology.running_devices("cpu") == {device.id: device for device in jax.devices()}
    assert topology.process_index() == 0


def test_a_platform_that_is_not_there_is_an_error_or_nothing():
    with pytest.raises(TopologyError, match=r"no devices of platform 'quantum'.*meshwright doctor"):
        topology.devices("quantum")
    assert topology.running_devices("quantum") == {}


def test_asking_which_devices_are_running_starts_none():
    out = run_in_fresh_process(
        """
        import meshwright as mw, jax
        from meshwright import topology
        from meshwright._compat import jax_is_running
        print(topology.running_devices("cpu"), jax_is_running())
        """
    )
    assert out == "{} False\n"


def test_on_tpus_the_order_follows_the_interconnect_and_elsewhere_it_stays():
    assert topology.in_mesh_order((4, 2), jax.devices()[::-1]) == jax.devices()[::-1]


@dataclass(frozen=True)
class Chip:
    """What JAX asks of a TPU to lay a mesh."""

    id: int
    coords: tuple[int, ...]
    device_kind: str
    platform: str = "tpu"
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5p", "TPU v5 lite"])
@pytest.mark.parametrize("torus", [(4, 4, 1), (4, 4, 4), (2, 4, 1)])
def test_an_axis_may_take_a_part_of_a_dim_of_the_torus(kind, torus):
    places = enumerate(itertools.product(*map(range, torus)))
    chips = [Chip(number, place, kind) for number, place in places]
    sizes = [2**power for power in range(len(chips).bit_length())]
    for outer in sizes:
        laid = topology.in_mesh_order((outer, len(chips) // outer), chips)
        assert sorted(device.id for device in laid) == [chip.id for chip in chips]
        lengths = [
            sum(abs(a - b) for a, b in zip(one.coords, two.coords, strict=True))
            for one, two in zip(laid[::2], laid[1::2], strict=True)
        ]
        assert outer == len(chips) or set(lengths) <= {1}  # the first two of a row are neighbours
