"""Checkpoints of arrays: what is written, what is chosen, what is removed, what fits."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.checkpoint import claims, files
from meshwright.checkpoint.randomness import read_randomness, write_randomness
from meshwright.run.saver import Saver


def state_of(**params: Any) -> mw.TrainState:
    return mw.TrainState(params, {}, {}, {})


def mesh_of(**axes: int) -> mw.Mesh:
    count = int(np.prod(list(axes.values())))
    return mw.create_mesh(axes, devices=jax.devices()[:count])


def on(mesh: mw.Mesh, *specs: Any) -> NamedSharding:
    return NamedSharding(mesh.jax_mesh, PartitionSpec(*specs))


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    values = {
        "a/float32": draw.standard_normal([8, 6]).astype("float32"),
        "a.b/bfloat16": jnp.asarray(draw.standard_normal([8]), "bfloat16"),
        "float16": draw.standard_normal([3]).astype("float16"),
        "count": np.array(7, "int32"),
        "seed": np.array([1, 2**32 - 1], "uint32"),
        "flag": np.array([True, False]),
        "nothing": np.zeros([0, 4], "float32"),
        "odd name: é ü [0]": np.arange(5, dtype="int8"),
        "nan": np.array([np.nan, -0.0, np.inf], "float32"),
    }
    everywhere = on(mesh_of(batch=8))
    state = state_of(**{k: jax.device_put(v, everywhere) for k, v in values.items()})
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        restored = checkpoints.restore(state)
    for name, value in values.items():
        result = np.asarray(restored.params[name])
        assert result.dtype == np.asarray(value).dtype
        assert result.tobytes() == np.asarray(value).tobytes(), name


MESHES: list[tuple[dict[str, int], tuple[Any, ...]]] = [
    ({"one": 1}, ()),
    ({"batch": 8}, ()),
    ({"batch": 8}, ("batch", None)),
    ({"batch": 4, "model": 2}, (None, "model")),
    ({"batch": 2, "model": 2}, ("model", "batch")),
    ({"a": 2, "b": 2, "c": 2}, (("c", "a"), "b")),
]


@pytest.mark.parametrize("there", MESHES, ids=str)
@pytest.mark.parametrize("here", MESHES, ids=str)
def test_every_layout_restores_from_every_other(here: Any, there: Any, tmp_path: Path) -> None:
    value = np.arange(16 * 8, dtype="float32").reshape(16, 8)
    axes, specs = here
    written = jax.device_put(value, on(mesh_of(**axes), *specs))
    axes, specs = there
    expected = jax.ShapeDtypeStruct(value.shape, "float32", sharding=on(mesh_of(**axes), *specs))
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state_of(w=written))
        restored = checkpoints.restore(state_of(w=expected)).params["w"]
    assert restored.sharding.is_equivalent_to(expected.sharding, 2)
    for shard in restored.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])


def test_a_state_may_be_donated_as_soon_as_it_is_saved(tmp_path: Path) -> None:
    everywhere = on(mesh_of(batch=4, model=2))
    split = on(mesh_of(batch=4, model=2), None, "model")
    step = jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s), donate_argnums=0)
    state = state_of(
        w=jax.device_put(np.zeros([512, 512], "float32"), split),
        b=jax.device_put(np.zeros([512, 512], "float32"), everywhere),
    )
    with mw.Checkpoints(tmp_path, keep=None) as checkpoints:
        for number in range(4):
            checkpoints.save(number, state)
            state = step(step(state))
        for info in checkpoints.all:
            for value in checkpoints.restore(state, info).params.values():
                np.testing.assert_array_equal(value, 2.0 * info.step)


def test_a_checkpoint_is_described_without_jax_or_any_device(tmp_path: Path) -> None:
    with mw.Checkpoints(tmp_path) as checkpoints:
        state = mw.TrainState({"w": np.zeros([4, 2], "float32")}, {}, {"m": np.zeros(3)}, {})
        checkpoints.save(12, state, mw.Position(2, 3), layout="batch=8", notes={"who": "me"})
    code = f"""
import sys, meshwright as mw
print(mw.read_checkpoint({str(tmp_path)!r}))
assert mw.read_checkpoint({str(tmp_path)!r}).notes["who"] == "me"
assert not {{"jax", "numpy", "orbax", "tensorstore"}} & set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        f"{tmp_path}/step_12: step 12, epoch 2 after 3 batches, 56 bytes",
        "written under batch=8",
        "params: 1 arrays",
        "  w (4, 2) float32",
        "slots: 1 arrays",
        "  m (3,) float64",
    ]


def test_the_description_is_a_value(tmp_path: Path) -> None:
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(w=np.zeros(2)))
        info = checkpoints.latest
    assert isinstance(info, mw.CheckpointInfo)
    assert info == mw.read_checkpoint(tmp_path) == mw.read_checkpoint(info.directory)
    with pytest.raises(AttributeError):
        info.step = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_half_written_is_never_chosen_and_is_cleared_away(tmp_path: Path) -> None:
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(w=np.zeros(2)))
    complete = tmp_path / "step_1"
    for name in (
        "step_9.orbax-checkpoint-tmp",
        "step_8.orbax-checkpoint-tmp-123",
        "step_7.removed",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_CHECKPOINT_METADATA").write_text(
            (complete / "_CHECKPOINT_METADATA").read_text()
        )
    (tmp_path / "step_6").mkdir()  # a directory that somebody else made
    (tmp_path / "notes.txt").write_text("mine")
    assert mw.read_checkpoint(tmp_path).step == 1
    with mw.Checkpoints(tmp_path) as checkpoints:
        assert [info.step for info in checkpoints.all] == [1]
        checkpoints.save(2, state_of(w=np.zeros(2)))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step_1", "step_2", "step_6", "notes.txt"}


def test_old_ones_are_removed_only_when_the_newest_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, actual = threading.Event(), []
    write = files.write

    def slow(*args: Any) -> None:
        assert go_on.wait(30)
        actual.append(sorted(path.name for path in tmp_path.glob("step_*")))
        write(*args)

    monkeypatch.setattr(files, "write", slow)
    with mw.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state_of(w=np.zeros(2)))  # returns though it cannot be written yet
        go_on.set()
        checkpoints.save(2, state_of(w=np.zeros(2)))
        checkpoints.save(3, state_of(w=np.zeros(2)))
    assert actual == [[], ["step_1"], ["step_2"]]
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_the_same_step_again_leaves_the_first_alone(tmp_path: Path) -> None:
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state_of(w=np.zeros(2)))
        checkpoints.save(5, state_of(w=np.ones(2)), mw.Position(1, 0))
        assert [info.position.epoch for info in checkpoints.all] == [0, 1]
        assert checkpoints.restore(state_of(w=np.zeros(2))).params["w"].sum() == 2
    assert mw.read_checkpoint(tmp_path, step=5).position.epoch == 1


def test_a_step_is_a_whole_number(tmp_path: Path) -> None:
    state = state_of(w=np.zeros(2))
    with mw.Checkpoints(tmp_path) as checkpoints:
        numbers: list[Any] = [np.int64(4), jnp.int32(5)]
        for step in numbers:
            checkpoints.save(step, state)
        assert [info.step for info in checkpoints.all] == [4, 5]
        for step in (-1, 2.5, "last", True, None):
            with pytest.raises(mw.CheckpointError, match="expected a whole number, at least 0"):
                checkpoints.save(step, state)  # type: ignore[arg-type]


def test_a_save_that_fails_is_told_at_the_next_one_and_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    checkpoints = mw.Checkpoints(tmp_path)
    checkpoints.save(1, state_of(w=np.zeros(2)))
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        checkpoints.save(2, state_of(w=np.zeros(2)))
        with pytest.raises(mw.CheckpointError, match="could not be written: No space left"):
            checkpoints.save(3, state_of(w=np.zeros(2)))
        checkpoints.save(3, state_of(w=np.zeros(2)))
        with monkeypatch.context() as away:
            away.setattr(checkpoints, "directory", tmp_path / "gone")
            with pytest.raises(mw.CheckpointError, match=r"No space left on device\. The ones"):
                checkpoints.wait()
        checkpoints.save(3, state_of(w=np.zeros(512)))
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1024))
        with pytest.raises(mw.CheckpointError, match=r"has 1 KiB left, and a checkpoint takes 4 K"):
            checkpoints.wait()
    checkpoints.save(4, state_of(w=np.zeros(2)))
    assert [info.step for info in checkpoints.all] == [1, 4]
    checkpoints.close()


def test_all_that_differs_is_listed_at_once_with_the_nearest_names(tmp_path: Path) -> None:
    saved = mw.TrainState(
        {"hidden/kernel": np.zeros([4, 2], "float32"), "hidden/bias": np.zeros(2, "float32")},
        {"seed": np.zeros(2, "uint32")},
        {},
        {},
    )
    expected = mw.TrainState(
        {"hiden/kernel": np.zeros([4, 2], "float32"), "hidden/bias": np.zeros(3, "float32")},
        {"seed": np.zeros(2, "int32")},
        {},
        {},
    )
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        with pytest.raises(mw.CheckpointError) as error:
            checkpoints.restore(expected)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("4 array(s) of")
    assert lines[1:5] == [
        "  params hiden/kernel (4, 2) float32 is not in the checkpoint (near: hidden/kernel)",
        "  params hidden/bias (3,) float32 was saved as (2,) float32",
        "  state seed (2,) int32 was saved as (2,) uint32",
        "  params hidden/kernel (4, 2) float32 is in the checkpoint only",
    ]


def test_weights_that_were_frozen_since_are_restored_before(tmp_path: Path) -> None:
    weights = {"w": np.ones(2)}
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, mw.TrainState(weights, {}, {}, {}))
        with pytest.raises(mw.CheckpointError, match=r"then freeze or unfreeze layers\.$"):
            checkpoints.restore(mw.TrainState({}, weights, {}, {}))


def test_parts_that_nobody_asks_for_are_left_out(tmp_path: Path) -> None:
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, mw.TrainState({"w": np.ones(2)}, {}, {"m": np.ones(3)}, {}))
        restored = checkpoints.restore(state_of(w=np.zeros(2)))
    assert restored.slots == {}
    np.testing.assert_array_equal(restored.params["w"], 1)


def test_restoring_makes_no_large_array_whole_on_a_device(tmp_path: Path) -> None:
    split = on(mesh_of(batch=8), "batch")
    value = jax.device_put(np.ones([8, 2**16], "float32"), split)
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(w=value))
        expected = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=split)
        before = {id(array) for array in jax.live_arrays()}
        restored = checkpoints.restore(state_of(w=expected)).params["w"]
        new = [array for array in jax.live_arrays() if id(array) not in before]
    assert restored.addressable_shards[0].data.shape == (1, 2**16)
    assert all(a.sharding.shard_shape(a.shape) != value.shape for a in new)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda path: mw.read_checkpoint(path / "nowhere"), "there is no directory"),
        (lambda path: mw.read_checkpoint(path / "file"), "file is a file, and not a directory"),
        (lambda path: mw.read_checkpoint(path / "empty"), "holds no complete checkpoint"),
        (lambda path: mw.read_checkpoint(path / "run", step=4), r"no checkpoint of step 4.*\[1\]"),
        (lambda path: mw.read_checkpoint(path / "foreign"), r"no checkpoint that Meshwright wrote"),
        (lambda path: mw.Checkpoints(path / "empty").restore(state_of()), "no complete checkpoint"),
        (lambda path: mw.Checkpoints(path / "run", keep=0), "keep=0"),
        (lambda path: mw.Checkpoints("gs://bucket/run"), "'gs://bucket/run' is an address"),
        (lambda path: mw.Checkpoints(Path("s3://bucket/run")), "is an address"),
        (lambda path: mw.Checkpoints(""), "received an empty one"),
    ],
)
def test_what_is_not_there_is_said(ask: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "foreign" / "step_1").mkdir(parents=True)
    with mw.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state_of(w=np.zeros(2)))
    with pytest.raises(mw.CheckpointError, match=says):
        ask(tmp_path)


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(w=np.zeros(2)))
    file = tmp_path / "step_1" / "_CHECKPOINT_METADATA"
    record = json.loads(file.read_text())
    record["custom_metadata"]["meshwright"]["format"] = 99
    file.write_text(json.dumps(record))
    with pytest.raises(mw.CheckpointError, match=r"format 99.*Upgrade"):
        mw.read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"custom_metadata": {"meshw', "step_2/_CHECKPOINT_METADATA is damaged: its JSON"),
        ('{"custom_metadata": {"meshwright": {"format": 2}}}', "is incomplete"),
        ("[]", "is incomplete"),
        (b"\xff\xfe", "it is not text"),
    ],
)
def test_a_record_that_is_cut_off_is_an_error_of_its_checkpoint(
    text: str | bytes, says: str, tmp_path: Path
) -> None:
    with mw.Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(w=np.zeros(2)))
    file = tmp_path / "step_2" / "_CHECKPOINT_METADATA"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(mw.CheckpointError, match=says):
        mw.read_checkpoint(tmp_path)
    assert mw.read_checkpoint(tmp_path, step=1).step == 1  # the others can be read
    with mw.Checkpoints(tmp_path, keep=1) as checkpoints:  # and more are written
        checkpoints.save(3, state_of(w=np.zeros(2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]


@pytest.mark.parametrize("lost", ["manifest.ocdbt", "d/*", "ocdbt.process_0/d/*"])
def test_files_that_are_cut_off_or_missing_are_an_error_of_their_checkpoint(
    lost: str, tmp_path: Path
) -> None:
    state = state_of(w=np.arange(3e5, dtype="float32"))
    with mw.Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
    files_of_step = list((tmp_path / "step_2").glob(lost))
    for file in files_of_step:
        file.write_bytes(b"")
    assert files_of_step
    with pytest.raises(mw.CheckpointError, match=r"step_2 is damaged.*Move step_2 out"):
        mw.Checkpoints(tmp_path).restore(state)
    (tmp_path / "step_2").rename(tmp_path / "damaged")
    assert mw.Checkpoints(tmp_path).restore(state).params["w"][-1] == 299_999


def test_only_one_process_runs_in_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_WAIT_S", 0.1)
    (tmp_path / "run").mkdir()
    other = os.open(tmp_path / "run", os.O_RDONLY)  # a lock of its own, as another process has it
    fcntl.flock(other, fcntl.LOCK_EX)
    unfinished = tmp_path / "run" / "step_3.orbax-checkpoint-tmp"
    unfinished.mkdir()
    saver = Saver.of(tmp_path / "run", None, 3, "auto")
    with pytest.raises(mw.CheckpointError, match="another process is running"), saver.claimed():
        pass
    with mw.Checkpoints(tmp_path / "run") as checkpoints:  # one by hand, beside a run
        checkpoints.save(1, state_of(w=np.zeros(2)))
    assert unfinished.exists()
    os.close(other)
    again = Saver.of(tmp_path / "run", None, 3, "auto")
    with saver.claimed(), again.claimed():  # two of one process
        assert not unfinished.exists()
        assert saver.start is not None  # what the other one wrote after this one was made
        assert (saver.start.step, saver.step) == (1, 1)
        with saver.running():
            pass
        assert claims.is_held(tmp_path / "run")
        with again.running():
            pass
        assert not claims.is_held(tmp_path / "run")  # though the program is not yet out of fit
    with pytest.raises(ZeroDivisionError), saver.claimed():
        _ = 1 / 0
    assert not claims.is_held(tmp_path / "run")


def test_a_fork_does_not_hold_the_directory_of_its_parent(tmp_path: Path) -> None:
    code = f"""if True:
        import os, pathlib, signal, time
        from meshwright.checkpoint import claims
        run = pathlib.Path({str(tmp_path)!r})
        with claims.claimed(run):
            assert claims.is_held(run)
            read, write = os.pipe()
            child = os.fork()
            if not child:
                os.write(write, b".")
                time.sleep(30)
            os.read(read, 1)
        print(claims.is_held(run))
        os.kill(child, signal.SIGKILL)
    """
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout == "False\n"


def test_randomness_comes_back_after_normal_draws_too() -> None:
    np.random.seed(3)
    np.random.standard_normal(3)  # the generator keeps one number in hand
    before = json.loads(json.dumps(read_randomness()))
    first = np.random.standard_normal(3), np.random.permutation(9)
    write_randomness(before)
    again = np.random.standard_normal(3), np.random.permutation(9)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


SLOTS = {
    "count": np.asarray(7, "int64"),
    "narrow": np.arange(3).astype(jnp.bfloat16),
    "flags": np.asarray([[True, False]]),
    "none": np.zeros([0, 3], "float32"),
    "large": np.arange(2.0**18),  # an array of its own
    "kernel": np.arange(6.0, dtype="float32").reshape(2, 3),
}


def test_small_arrays_are_written_as_one_and_come_back_as_they_were(tmp_path: Path) -> None:
    state = mw.TrainState({"w": np.ones(2), "b": np.ones(1)}, {}, SLOTS, {})
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        info = checkpoints.latest
        assert info is not None
        assert info.packed == tuple(f"slots/{p}" for p in ("count", "narrow", "flags", "kernel"))
        restored_state = checkpoints.restore(state)
        rows = mw.Layout([None, "model"], mw.create_mesh({"model": 3}, devices=jax.devices()[:3]))
        laid = jax.ShapeDtypeStruct((2, 3), "float32", sharding=rows.sharding)
        some = checkpoints.restore(mw.TrainState({}, {}, SLOTS | {"kernel": laid}, {}))
    for path, value in SLOTS.items():
        assert restored_state.slots[path].dtype == value.dtype
        np.testing.assert_array_equal(restored_state.slots[path], value)
        np.testing.assert_array_equal(some.slots[path], value)
    assert some.slots["kernel"].sharding.shard_shape((2, 3)) == (2, 1)


def test_a_checkpoint_of_the_format_before_packing_is_read(tmp_path: Path) -> None:
    state = mw.TrainState({"w": np.ones(2)}, {}, {"n": np.arange(3.0)}, {})
    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)  # one small array is not packed
        file = tmp_path / "step_1" / "_CHECKPOINT_METADATA"
        checkpoints.wait()
        record = json.loads(file.read_text())
        ours = record["custom_metadata"]["meshwright"]
        ours["format"] = 1
        assert ours.pop("packed") == []
        file.write_text(json.dumps(record))
        np.testing.assert_array_equal(checkpoints.restore(state).slots["n"], np.arange(3.0))


def test_orbax_alone_reads_the_parameters(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with mw.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(**{"hidden/kernel": np.arange(4.0)}))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as plain:
        tree = plain.restore(tmp_path / "step_1")
    np.testing.assert_array_equal(tree["params/hidden/kernel"], np.arange(4.0))


MISSING = {
    "Sharded.fit": lambda path: sharded().fit(lone_layer(), *ROWS, checkpoint=path),
    "Sharded.save": lambda path: sharded().save(lone_layer(), path),
    "Sharded.restore": lambda path: sharded().restore(lone_layer(), path),
    "ParameterServer.fit": lambda path: served(lone_layer(), *ROWS, checkpoint=path),
    "Checkpoints": mw.Checkpoints,
}
ROWS = np.ones([8, 4], "float32"), np.ones([8, 2], "float32")


def lone_layer() -> Any:
    import keras

    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def sharded() -> mw.Sharded:
    return mw.DataParallel(mw.create_mesh({"batch": 8}))


def served(*args: Any, **options: Any) -> None:
    with mw.ParameterServer() as strategy:
        strategy.fit(*args, verbose=0, **options)


@pytest.mark.parametrize("call", MISSING)
def test_a_missing_orbax_is_said_before_any_work(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(mw.CheckpointError, match=r'pip install "meshwright\[checkpoint\]"'):
        MISSING[call](tmp_path)
    assert not list(tmp_path.iterdir())
