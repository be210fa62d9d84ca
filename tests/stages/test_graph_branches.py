"""Independent branches of unchanged models, each on its device: one device's numbers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import conv, mesh_of
from small_transformer import KEEPS_GRADIENTS

import meshwright as mw

TOLERANCE = 5e-6  # of the largest gradient
ROWS = 8


def images() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "x": draw.normal(size=[ROWS, 6, 6, 3]).astype("float32"),
        "y": draw.integers(0, 5, ROWS).astype("int32"),
    }


DIMS = {
    "stem": (3, 3, 3, 4),
    "a/one": (1, 1, 4, 2),
    "a/three": (3, 3, 4, 4),
    "a/five": (5, 5, 4, 2),
    "a/pool": (1, 1, 4, 2),
    "b/one": (1, 1, 10, 3),
    "b/reduce": (1, 1, 10, 4),
    "b/three": (3, 3, 4, 5),
    "head": (8, 5),
}


def inception_loss(params: Any, batch: Any) -> Any:
    """Two blocks of branches; one weight scales branches of both devices; a penalty on kernels."""
    x = jax.nn.relu(conv(batch["x"], params["stem"]))
    pooled = (x + jnp.roll(x, 1, 1)) / 2
    x = jnp.concatenate(
        [
            conv(x, params["a/one"]),
            jnp.tanh(conv(x, params["a/three"])) * params["scale"],
            jnp.tanh(conv(x, params["a/five"])) * params["scale"],
            conv(pooled, params["a/pool"]),
        ],
        -1,
    )
    reduced = jnp.tanh(conv(x, params["b/reduce"]))
    branches = [conv(x, params["b/one"]) * params["scale"], conv(reduced, params["b/three"])]
    x = jnp.concatenate(branches, -1).mean((1, 2))
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["y"])
    penalty = sum((params[name] ** 2).sum() for name in DIMS)
    return losses.mean() + 1e-2 * penalty


def inception(optimizer: Any = KEEPS_GRADIENTS) -> mw.Program:
    draw = np.random.default_rng(1)
    params = {name: (0.3 * draw.normal(size=of)).astype("float32") for name, of in DIMS.items()}
    params["scale"] = np.full([], 1.5, "float32")
    return mw.jax_program(inception_loss, params, optimizer, batch=images())


def stepped(mesh: dict[str, int], branches: mw.Branches | None = None) -> tuple[Any, float]:
    placement = mw.Placement.of(mesh_of(mesh), batch="data" if "data" in mesh else None)
    trainer = mw.Trainer(inception(), placement, mw.StepOptions(pipeline=branches))
    state, logs = trainer.step(trainer.init(), trainer.put(images()))
    return jax.tree.map(np.asarray, trainer.unpadded(state)), float(logs["loss"])


@pytest.mark.parametrize(
    "mesh",
    [{"branch": 2, "data": 2}, pytest.param({"branch": 4}, marks=pytest.mark.full)],
)
def test_branches_have_the_gradients_of_one_device(mesh: dict[str, int]) -> None:
    (reference, loss), (actual, same) = stepped({"data": 1}), stepped(mesh, mw.Branches("branch"))
    assert same == pytest.approx(loss, rel=1e-5)
    for part, expected in zip(actual, reference, strict=True):
        largest = max((np.abs(values).max() for values in expected.values()), default=0.0)
        for path, values in expected.items():
            assert np.abs(part[path] - values).max() <= TOLERANCE * largest, path


def trainer_of(program: mw.Program, axes: dict[str, int], **more: Any) -> mw.Trainer:
    placement = mw.Placement.of(mesh_of(axes), **{"batch": None, **more})
    return mw.Trainer(program, placement, mw.StepOptions(pipeline=mw.Branches("branch")))


def test_a_branch_lies_on_its_device_and_branches_are_dealt_by_flops() -> None:
    state = trainer_of(inception(optax.adam(0.1)), {"branch": 2}).init()
    for values, kinds in ((state.params, 1), (state.slots, 2)):
        rows = [value for path, value in values.items() if path.endswith("by branch")]
        assert [{s.data.shape[0] for s in row.addressable_shards} for row in rows] == [{1}] * kinds
    (row,) = (value for path, value in state.params.items() if path.endswith("by branch"))
    used = [int((np.asarray(shard.data) != 0).sum()) for shard in row.addressable_shards]
    # The five-by-five and the wide branch of b, then what is left to balance them.
    size = {name: math.prod(of) for name, of in DIMS.items()}
    assert used == [
        size["a/five"] + size["b/reduce"] + size["b/three"],
        size["a/three"] + size["a/one"] + size["a/pool"] + size["b/one"],
    ]


@pytest.mark.parametrize(
    ("axes", "more", "message"),
    [
        ({"branch": 2}, {"zero": 1, "batch": "branch"}, "given to the branches and to the batch"),
        ({"branch": 2, "model": 2}, {}, "axis 'model' splits more than the rows"),
        ({"data": 2}, {"batch": "data"}, "has no axis 'branch' for the branches"),
    ],
)
def test_what_branches_do_not_go_with_is_refused(
    axes: dict[str, int], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(mw.PipelineError, match=message):
        trainer_of(inception(), axes, **more).init()


def test_a_chain_of_layers_has_no_branches() -> None:
    def loss(params: Any, x: Any) -> Any:
        return (jnp.tanh(x @ params["a"]) @ params["b"]).mean()

    params = {name: np.ones([4, 4], "float32") for name in "ab"}
    program = mw.jax_program(loss, params, optax.sgd(0.1), batch=np.ones([8, 4], "float32"))
    with pytest.raises(mw.PipelineError, match="no independent branches"):
        trainer_of(program, {"branch": 2}).init()


def test_devices_without_a_branch_are_warned_of_and_each_branch_is_named() -> None:
    def loss(params: Any, x: Any) -> Any:
        towers = [jnp.tanh(x @ params[n]["up"]["w"]) @ params[n]["down"]["w"] for n in "abc"]
        return sum(towers).mean()

    tower = {"up": {"w": np.ones([4, 8], "float32")}, "down": {"w": np.ones([8, 2], "float32")}}
    batch = np.ones([8, 4], "float32")
    program = mw.jax_program(loss, dict.fromkeys("abc", tower), optax.sgd(0.1), batch=batch)
    report = trainer_of(program, {"branch": 2}).explain()
    assert [share.spans for share in report.stages] == [
        ("a/up to a/down (2 layers)", "c/up to c/down (2 layers)"),
        ("b/up to b/down (2 layers)",),
    ]
    assert "branches 0  a/up to a/down (2 layers), c/up to c/down (2 layers)" in str(report)
    with pytest.warns(mw.MeshwrightWarning, match=r"splits 4 ways, and .* 3 .*: 25% .* branch=3"):
        trainer_of(program, {"branch": 4}).explain()
