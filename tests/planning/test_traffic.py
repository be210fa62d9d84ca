"""What a step reads and writes by the planner's model, and the time that it tells by that."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from models import shapes as shape

import meshwright as mw
from meshwright.jaxprs.names import Argument
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.search import cost
from meshwright.planning.search.traffic import traffic_of
from meshwright.planning.traced_graph import graph_of, graph_of_step
from meshwright.targets.hardware import hardware_of


def graph(loss, weights, batch, optimizer=None):
    program = mw.jax_program(loss, weights, optimizer or optax.sgd(0.1))
    return graph_of_step(abstract_step(program, batch, mw.Sharded(mw.Mesh({"batch": 1}))))


def moved(step, platform, shape):
    """How often arrays of a shape are read or written."""
    every = [t for far, near in traffic_of(step, platform, "") for t in (*far, *near)]
    return sum(step.tensors[t].shape == shape for t in every)


def attention(weights, x):
    scores = jax.nn.softmax(x @ weights["scores"])
    return jnp.sum(scores @ weights["values"])


def test_a_softmax_is_one_kernel_on_gpus():
    """A product writes the scores, the kernel reads them and writes weights, a product reads
    those."""
    weights = {"scores": shape(32, 64), "values": shape(64, 16)}
    jaxpr = jax.make_jaxpr(attention)(weights, shape(128, 32))
    arguments = [Argument("scores"), Argument("values"), Argument("x", "input")]
    assert moved(graph_of(jaxpr, arguments), "cuda", (128, 64)) == 4


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_an_update_is_one_kernel(platform):
    """A product writes the gradient; Adam reads it with the weights and two slots, and writes
    those three."""
    loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    step = graph(loss, shape(64, 48), shape(256, 64), optax.adam(0.1))
    forward = 1  # a product reads the weights, whose data have no gradient
    assert moved(step, platform, (64, 48)) == forward + 1 + 4 + 3


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_layers_are_read_in_their_stack(platform):
    """Both passes read all layers once, the update too, with a gradient that is written before."""

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0])

    step = graph(loss, shape(6, 32, 32), shape(128, 32))
    assert moved(step, platform, (6, 32, 32)) == 2 + 1 + 3
    assert moved(step, platform, (32, 32)) == 1  # the gradient of one


def test_what_fits_in_a_tpu_takes_no_time_to_read():
    """Half of its own memory is one array's; of a larger one the rest is read from memory."""
    step = graph(attention, {"scores": shape(32, 4096), "values": shape(4096, 16)}, shape(512, 32))
    array = 512 * 4096 * 4  # the scores
    times = [
        cost(
            step,
            (("data", 1),),
            {},
            target="v5e:1x1",
            hardware=replace(hardware_of("v5e"), on_chip_bytes=size),
        ).time_s
        for size in (None, array, 2 * array, 8 * array)
    ]
    assert times[0] > 1.1 * times[1] > 1.21 * times[2]
    assert times[2] == pytest.approx(times[3], rel=0.01)
