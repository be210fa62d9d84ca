"""A server follows a run: every answer is of one version, and a broken checkpoint is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw

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
    given = {"params": shapes, "example": EXAMPLE, "name": "f", "checkpoint": run, "max_rows": 4}
    return mw.Server(constant, placement, **given, **options)


def test_weights_change_between_batches_and_nothing_is_compiled(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)
    with serve(tmp_path, follow_s=0.02) as server:
        model = server.model("f")
        compiled = model.forward.shapes

        async def ask_until(version: str) -> set[tuple[str, float, float]]:
            found = set()
            for _ in range(5000):
                sent = [model.predict({"input": np.zeros([n, 2])}) for n in (1, 2, 7)]
                for answer in await asyncio.gather(*sent):
                    for row in answer.outputs["output"]:
                        found.add((answer.version, *map(float, row)))
                if version in {each[0] for each in found}:
                    return found
            raise AssertionError(f"version {version} was not served: {model.status().events}")

        for step in (2, 3):
            save(tmp_path, step)
            found = asyncio.run(ask_until(str(step)))
            assert found <= {(str(n), float(n), float(n)) for n in (step - 1, step)}
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
        with pytest.raises(mw.CheckpointError, match="step_2 cannot be read"):
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


def test_versions_share_the_traffic_and_are_compared(tmp_path: Path) -> None:
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
        assert not server.ready
        server.load()
        answers = [server.answer({"input": np.zeros([1, 2])}) for _ in range(12)]
        assert [answer.version for answer in answers].count("2") == 3
        assert all(a.outputs["output"][0, 0] == float(a.version) for a in answers)
        assert server.compared("f") == {"2/output": 1.0}
        assert canary.status().answers["answered"] == 3 + 4  # every second of the other nine
        assert server.versions("f") == ("1", "2")
        assert server.model("f", "2").version == "2"
        with pytest.raises(mw.UnknownModelError, match="no version '3'; it has 1, 2"):
            server.model("f", "3")
        with pytest.raises(mw.ModelError, match=r"that is 1\.15 of 1"):
            server.add(constant, placement, version="9", share=0.9, **options)
