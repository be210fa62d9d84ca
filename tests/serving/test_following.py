"""A server follows a run: every answer is of one version, and a broken checkpoint is refused."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from http_calls import Call

import meshwright as mw
from meshwright.serving import following
from meshwright.serving.turns import turn

ASKED = {"input": np.zeros([1, 2])}
EXAMPLE = np.zeros([1, 2], "float32")


def constant(params: Any, x: Any) -> Any:
    """Each row's answer is the version of both weights that it was computed with."""
    return jnp.stack([params["a"].mean() + x[:, 0], params["b"].mean() + x[:, 0]], 1)


def save(run: Path, step: int, value: float | None = None) -> None:
    value = step if value is None else value
    params = {name: np.full([8, 4], value, "float32") for name in ("a", "b")}
    with mw.Checkpoints(run, keep=None) as checkpoints:
        checkpoints.save(step, mw.TrainState(params, {}, {"a/momentum": params["a"]}, {}))


def serve(run: Path, **options: Any) -> mw.Server:
    placement = mw.Placement.of(mw.create_mesh({"batch": 2, "model": 4}), {"a|b": ["model", None]})
    shapes = {name: jax.ShapeDtypeStruct((8, 4), "float32") for name in ("a", "b")}
    settings = {"params": shapes, "example": EXAMPLE, "name": "f", "checkpoint": run, "max_rows": 4}
    return mw.Server(constant, placement, **settings, **options)


def test_weights_change_between_batches_and_nothing_is_compiled(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)
    with serve(tmp_path, follow_s=0.02) as server:
        model = server.model("f")
        compiled = model.forward.shapes

        async def ask_until(version: str) -> set[tuple[str, float, float]]:
            result = set()
            for _ in range(5000):
                sent = [model.predict({"input": np.zeros([n, 2])}) for n in (1, 2, 7)]
                for answer in await asyncio.gather(*sent):
                    for row in answer.outputs["output"]:
                        result.add((answer.version, *map(float, row)))
                if version in {row[0] for row in result}:
                    return result
            raise AssertionError(f"version {version} was not served: {model.status().events}")

        for step in (2, 3):
            save(tmp_path, step)
            result = asyncio.run(ask_until(str(step)))
            assert result <= {(str(n), float(n), float(n)) for n in (step - 1, step)}
        assert model.forward.shapes == compiled
        assert [e.split(":")[0] for e in model.status().events] == [
            "version 1 -> 2",
            "version 2 -> 3",
        ]


# Tensorstore's other reads end after Orbax has closed its loop, where one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_broken_checkpoint_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with serve(tmp_path, finite=True) as server:
        model = server.model("f")
        assert not model.reload()
        save(tmp_path, 2)
        for path in (tmp_path / "step_2").rglob("d/*"):
            path.write_bytes(path.read_bytes()[:10])
        with pytest.raises(mw.CheckpointError, match="step_2 is damaged, or not whole"):
            model.reload()
        assert not model.reload()  # it is not tried again
        save(tmp_path, 3, np.nan)
        with pytest.raises(mw.CheckpointError, match="version 3 has weights that are not finite"):
            model.reload()
        answer = server.answer({"input": np.zeros([1, 2])})
        assert (answer.version, answer.outputs["output"].tolist()) == ("1", [[1.0, 1.0]])
        save(tmp_path, 4)
        assert model.reload()
        assert server.answer({"input": np.zeros([1, 2])}).version == "4"
        assert [e.split(":")[0] for e in model.status().events] == [
            "refused step_2",
            "refused step_3",
            "version 1 -> 4",
        ]


def got(server: mw.Server, path: str) -> bytes:
    """The page of a server that runs already."""
    return asyncio.run(Call("GET", path).to(mw.serving_app(server))).body


def until(is_so: Callable[[], Any], within_s: float = 60.0) -> None:
    until_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def cut_the_record(checkpoint: Path) -> None:
    file = checkpoint / "_CHECKPOINT_METADATA"
    file.write_text(file.read_text()[:60])


def other_dims(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    with mw.Checkpoints(checkpoint.parent, keep=None) as checkpoints:
        params = {name: np.zeros([3, 4], "float32") for name in ("a", "b")}
        checkpoints.save(2, mw.TrainState(params, {}, {}, {}))


@pytest.mark.parametrize(
    ("harm", "says"),
    [(cut_the_record, "is damaged: its JSON"), (other_dims, "refused step_2: ")],
    ids=["record", "dims"],
)
def test_a_server_that_follows_a_run_survives_any_checkpoint_and_says_so(
    harm: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    run, beside = tmp_path / "run", tmp_path / "beside"
    save(run, 1)
    save(beside, 2)
    harm(beside / "step_2")
    with serve(run, follow_s=0.02) as server:
        model = server.model("f")
        shutil.move(beside / "step_2", run / "step_2")
        until(lambda: model.status().refusal)
        assert says in model.status().refusal
        time.sleep(0.1)
        assert server.answer(ASKED).version == "1"
        assert len(model.status().events) == 1  # it is said once
        metric = b'meshwright_newest_refused{model="f",version="1"} 1.0'
        assert metric in got(server, "/metrics")
        assert b"Newest checkpoint refused" in got(server, "/")
        save(run, 3)
        until(lambda: server.answer(ASKED).version == "3")
        assert not model.status().refusal
    until(lambda: not any("follow" in t.name for t in threading.enumerate()), 5)


def test_another_run_in_the_directory_is_served_also_at_the_same_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1)
    with serve(run, follow_s=0.02) as server:
        model: Any = server.model("f")
        shutil.rmtree(run)
        save(run, 1, 5)
        until(lambda: server.answer(ASKED).outputs["output"].tolist() == [[5.0, 5.0]])
        assert not model.reload()  # it is read once
        model.lead(lambda *_: None, 0, 1, lambda: None)
        shutil.rmtree(run)
        save(run, 1, 6)
        with pytest.raises(mw.CheckpointError, match="no longer the step 1 that is served"):
            model.reload()


def test_what_passes_is_not_damage_and_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_AGAIN_S", 0.05)
    save(tmp_path, 1)
    with serve(tmp_path) as server:
        model: Any = server.model("f")
        save(tmp_path, 2)
        read = type(model.source).read

        def full(*_: Any) -> None:
            raise MemoryError("RESOURCE_EXHAUSTED: 4096 bytes")

        monkeypatch.setattr(type(model.source), "read", full)
        with pytest.raises(mw.CheckpointError, match="does not fit into memory") as raised:
            model.reload()
        assert "damaged" not in str(raised.value)
        monkeypatch.setattr(type(model.source), "read", read)
        until(model.reload)
        assert server.answer(ASKED).version == "2"


def test_a_server_that_follows_begins_with_an_older_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    cut_the_record(tmp_path / "step_2")
    with pytest.raises(mw.CheckpointError, match=r"step_2.* is damaged"), serve(tmp_path):
        pass
    with serve(tmp_path, follow_s=60.0) as server:
        assert server.answer(ASKED).version == "1"
        assert "step_2" in server.model("f").status().refusal
    shutil.rmtree(tmp_path / "step_1")
    with pytest.raises(mw.CheckpointError, match=r"step_2.* is damaged"):
        serve(tmp_path, follow_s=60.0).load()


def test_what_runs_on_the_devices_takes_its_turn_among_the_batches(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with serve(tmp_path, finite=True) as server:
        model: Any = server.model("f")
        save(tmp_path, 2)
        thread = threading.Thread(target=model.reload)
        with turn(model.source.mesh):  # as a batch does
            thread.start()
            thread.join(1)
            assert thread.is_alive()
        thread.join(60)
        assert server.answer(ASKED).version == "2"


def test_a_checkpoint_that_one_process_cannot_read_is_refused_by_all(tmp_path: Path) -> None:
    """Rank 1, here a function, cannot read the second checkpoint, and can read the third."""
    save(tmp_path, 1)
    with serve(tmp_path) as server:
        model: Any = server.model("f")
        messages: list[str] = []

        def tell(word: dict[str, Any], arrays: Any = ()) -> None:
            if word["do"] == "batch":
                return
            is_bad = Path(word["directory"]).name == "step_2"
            messages.append(f"{word['do']} {Path(word['directory']).name}")
            fault = mw.CheckpointError("no such file.") if is_bad else None
            reply = {**following.reply_to(word, fault), "rank": 1}
            threading.Timer(0.05, model.answered, (reply, [])).start()

        model.lead(tell, 0, 1, lambda: None)
        save(tmp_path, 2)
        with pytest.raises(mw.CheckpointError, match="rank 1: no such file"):
            model.reload()
        assert server.answer(ASKED).version == "1"
        save(tmp_path, 3)
        assert model.reload()
        assert server.answer(ASKED).version == "3"
        assert messages == ["read step_2", "read step_3", "finish step_3"]
        with pytest.raises(mw.ModelError, match="is served by several processes"):
            model.update()


def test_a_process_that_follows_reads_as_it_is_asked_and_replies(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with serve(tmp_path) as server:
        model: Any = server.model("f")
        replies: list[dict[str, Any]] = []

        def ask(do: str, step: int, request: int) -> str:
            word = {"do": do, "model": 0, "request": request, "read": request - 1}
            word["directory"] = str(tmp_path / f"step_{step}")
            model.follow(word, [], lambda reply, _: replies.append(reply))
            until(lambda: replies and replies[-1]["request"] == request)
            return replies[-1]["error"]

        assert "step_2" in ask("read", 2, 1)  # there is none
        save(tmp_path, 2)
        assert [ask("read", 2, 2), ask("finish", 2, 3)] == ["", ""]
        batch = {"do": "batch", "version": "2", "rows": 2, "lengths": []}
        model.follow(batch, [np.zeros([2, 2], "float32")], None)
        assert server.answer(ASKED).version == "2"


def test_versions_share_the_traffic_and_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    with serve(tmp_path / "step_1") as server:
        placement = mw.Placement.of(mw.create_mesh({"batch": 8}))
        shapes = {name: jax.ShapeDtypeStruct((8, 4), "float32") for name in ("a", "b")}
        options = {"params": shapes, "example": EXAMPLE, "name": "f", "buckets": [8]}
        canary = server.add(
            constant, placement, checkpoint=tmp_path / "step_2", version="2", share=0.25,
            compare=0.5, **options,
        )  # fmt: skip
        assert server.ready  # it was loaded first
        answers = [server.answer({"input": np.zeros([1, 2])}) for _ in range(12)]
        assert [answer.version for answer in answers].count("2") == 3
        assert all(a.outputs["output"][0, 0] == float(a.version) for a in answers)
        assert server.compared("f") == {"2/output": 1.0}
        assert canary.status().answers["answered"] == 3 + 4  # every second of the other nine
        assert server.versions("f") == ("1", "2")
        assert server.model("f", "2").version == "2"
        with pytest.raises(mw.UnknownModelError, match="no version '3'; it has 1, 2"):
            server.model("f", "3")
        models = [server.model("f") for _ in range(8)]  # some of them are compared
        assert [model.status().version for model in models].count("2") == 2
        assert all(callable(model.reload) for model in models)
        canary.close()  # as one that fails: its share goes to the other
        assert {server.answer(ASKED).version for _ in range(8)} == {"1"}
        assert not server.ready
        with pytest.raises(mw.CheckpointError, match="no directory"):
            server.add(constant, placement, checkpoint=tmp_path / "none", version="3", **options)
        assert server.versions("f") == ("1", "2")
        with pytest.raises(mw.ModelError, match=r"that is 1\.15 of 1"):
            server.add(constant, placement, version="9", share=0.9, **options)
        monkeypatch.setattr(server, "_followers", object())
        with pytest.raises(mw.ModelError, match="before load"):
            server.add(constant, placement, version="9", share=0.1, **options)
        monkeypatch.undo()
