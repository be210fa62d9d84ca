"""A program as texts: the same in every process that traces it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.jaxprs.listing import listed, texts_of


def test_sets_among_parameters_are_in_order():
    """That of their elements differs between processes, whose hashes of texts do."""
    mesh = mw.create_mesh({"f": 2, "b": 2, "d": 2}).jax_mesh
    doubled = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("f"), out_specs=P("f"))
    traced = jax.make_jaxpr(doubled)(jnp.ones(8))
    assert "={b, d, f}" in " ".join(texts_of(traced))
    assert [each.text for each in listed(traced)] == list(texts_of(traced))


def test_programs_that_return_or_take_something_else_differ():
    def texts(returned, dtype="float32"):
        traced = jax.make_jaxpr(lambda x: returned(jnp.sin(x), jnp.cos(x)))(jnp.ones(8, dtype))
        return list(texts_of(traced))

    assert texts(lambda s, c: (s, c)) != texts(lambda s, c: (c, s))
    assert texts(lambda s, c: 1, "float32")[0] != texts(lambda s, c: 1, "bfloat16")[0]
