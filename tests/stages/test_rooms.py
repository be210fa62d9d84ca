"""Sums of gradients that no stage makes both of have one room."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import small_transformer
from jax import ShapeDtypeStruct as Shape
from models import mesh_of
from small_transformer import WIDTH, batch_of, loss, program_of, tied_loss
from test_pipelines import SPLIT

import meshwright as mw
from meshwright import _compat
from meshwright.stages.rooms import Rooms
from meshwright.stages.staged import Staged, abstract_of

WORDS = 40  # which are the dims of no weight of a block


def head_read_twice(params: Any, batch: Any) -> Any:
    """The head is read before the blocks as well."""
    return loss({**params, "embed": params["embed"] + params["head"].T}, batch)


def sums_of_a_vocabulary(of: Any, mesh: dict[str, int], **more: Any) -> int:
    """How many arrays with the dims of embedding and head the loop over ticks adds to."""
    program = program_of(4, of)
    placement = mw.Placement.of(mesh_of(mesh), batch="data" if "data" in mesh else None, **more)
    staged = Staged.of(program, placement, mw.Pipeline("stage", 4))

    def step(state: Any, batch: Any) -> Any:
        return staged.gradients(state, batch)

    shapes = jax.tree.map(lambda value: Shape(value.shape, value.dtype), batch_of())
    trace = program.under(
        placement,
        lambda: jax.make_jaxpr(step)(abstract_of(staged.program), shapes),
        whole=True,
    )
    return max(map(_carried, _loops_of(trace().jaxpr)))


def _carried(loop: Any) -> int:
    first, count = _compat.scan_counts(loop)
    dims = [sorted(var.aval.shape[-2:]) for var in loop.invars[first : first + count]]
    return dims.count([WIDTH, WORDS])


def _loops_of(jaxpr: Any) -> list[Any]:
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    for eqn in jaxpr.eqns:
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda of: hasattr(of, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            found += _loops_of(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize(
    ("of", "mesh", "more", "rooms"),
    [
        (loss, {"stage": 2, "data": 2}, {}, 1),
        (tied_loss, {"stage": 2}, {}, 1),
        (head_read_twice, {"stage": 2}, {}, 2),
        (loss, {"stage": 4}, {}, 2),  # all of which compute the loss
        (loss, {"stage": 2, "model": 2}, {"layouts": SPLIT}, 2),  # which XLA may split by columns
    ],
)
def test_embedding_and_head_have_one_room_where_no_stage_reads_both(
    monkeypatch: pytest.MonkeyPatch, of: Any, mesh: dict[str, int], more: Any, rooms: int
) -> None:
    monkeypatch.setattr(small_transformer, "WORDS", WORDS)
    assert sums_of_a_vocabulary(of, mesh, **more) == rooms


def test_rooms_are_found_for_sums_of_one_type_with_dims_of_the_same_sizes() -> None:
    ndims = {"embed": 2, "head": 2, "gain": 1, "bias": 1, "table": 2}
    before = {"embed": Shape((2, 8, 2), "float32"), "bias": Shape((8,), "bfloat16")}
    after = {"gain": Shape((8,), "float32"), "head": Shape((2, 2, 8), "float32")}
    large = Rooms({"head": ("embed", (0, 2, 1))})
    assert Rooms.of(before, after, ndims) == Rooms.of(before, after, ndims, 64) == large
    assert Rooms.of(before, after, ndims, 65) == Rooms()
    in_parts, whole = {"table": Shape((2, 8, 2), "float32")}, {"table": Shape((8, 2), "float32")}
    assert Rooms.of(whole, after, ndims) == Rooms.of(in_parts, whole, ndims) == Rooms()
    assert Rooms.of(whole, whole, ndims) == Rooms({"table": ("table", (0, 1))})
