"""The peer: the same steps by hand in plain JAX, ``jax.jit`` and ``NamedSharding``.

``--way`` chooses how gradients are summed: ``plain`` leaves it to XLA; ``scattered`` sums them to
pieces, updates each piece where it lies and gathers the parameters again; ``in_rows`` splits what
lies between the products of a model-parallel block over its rows, with the collectives by hand.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from named_jobs import DATA, JOBS, LEARNING_RATE, PARAMETERS, NamedJob, initial, layout
from named_protocol import measure
from protocol import eight_jax_devices

WAYS = ("plain", "scattered", "in_rows")


def mlp(p: dict[str, Any], x: Any, split: Any) -> Any:
    return jax.nn.relu(split(x @ p["w"], "batch hidden")) @ p["v"]


def normalised(x: Any, scale: Any) -> Any:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def block(p: dict[str, Any], x: Any, split: Any) -> Any:
    inner = normalised(x, p["scale_1"])
    q, k, v = (
        split(jnp.einsum("bld,dhk->blhk", inner, p[name]), "batch length heads d_kv")
        for name in "qkv"
    )
    scores = jnp.einsum("blhk,bmhk->bhlm", q * q.shape[-1] ** -0.5, k)
    mixed = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores, -1), v)
    x = x + jnp.einsum("blhk,hkd->bld", mixed, p["o"])
    inner = normalised(x, p["scale_2"])
    hidden = jax.nn.relu(split(jnp.einsum("bld,df->blf", inner, p["wi"]), "batch length d_ff"))
    return x + jnp.einsum("blf,fd->bld", hidden, p["wo"])


def block_in_rows(p: dict[str, Any], x: Any, axis: str) -> Any:
    """One device's rows of the block, of its pieces of the kernels and its own rows of ``x``."""

    def whole(x: Any) -> Any:
        return jax.lax.all_gather(x, axis, tiled=True)

    def rows(x: Any) -> Any:
        return jax.lax.psum_scatter(x, axis, tiled=True)

    kernel = jnp.stack([p[name] for name in "qkv"])
    inner = whole(normalised(x, p["scale_1"]))
    q, k, v = product("bld,sdhk->sbhlk", "bld,sbhlk->sdhk", inner, kernel)
    scores = jnp.einsum("bhlk,bhmk->bhlm", q * q.shape[-1] ** -0.5, k)
    mixed = jnp.einsum("bhlm,bhmk->bhlk", jax.nn.softmax(scores, -1), v)
    x = x + rows(product("bhlk,hkd->bld", "bhlk,bld->hkd", mixed, p["o"]))
    inner = whole(normalised(x, p["scale_2"]))
    hidden = jax.nn.relu(product("bld,df->blf", "bld,blf->df", inner, p["wi"]))
    return x + rows(product("blf,fd->bld", "blf,bld->fd", hidden, p["wo"]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(forward: str, of_kernel: str, x: Any, kernel: Any) -> Any:
    """A product whose kernel's gradient comes the way round in which it is wanted."""
    return jnp.einsum(forward, x, kernel)


def _product_forward(forward: str, of_kernel: str, x: Any, kernel: Any) -> Any:
    return jnp.einsum(forward, x, kernel), (x, kernel)


def _product_backward(forward: str, of_kernel: str, saved: Any, gradient: Any) -> Any:
    x, kernel = saved
    _, back = jax.vjp(lambda x: jnp.einsum(forward, x, kernel), x)
    return *back(gradient), jnp.einsum(of_kernel, x, gradient)


product.defvjp(_product_forward, _product_backward)


PROGRAMS = {"mlp": mlp, "block": block}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--way", choices=WAYS, default="plain")
    given = parser.parse_args()
    eight_jax_devices()
    job = JOBS[given.job]
    params, data, step = make(job, given.way)
    state = [params]

    def one() -> Any:
        state[0], loss = step(state[0], *data)
        return loss

    measure(f"hand_written_{given.way}", job, one, float)


def make(job: NamedJob, way: str) -> tuple[Any, Any, Any]:
    """Parameters and data where they lie, and the compiled step."""
    axes = {axis: int(size) for axis, size in layout(job.mesh).items()}
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)
    rules, program = layout(job.layout), PROGRAMS[job.program]

    def lies(dims: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(rules.get(dim) for dim in dims.split())))

    def split(x: Any, dims: str) -> Any:
        return jax.lax.with_sharding_constraint(x, lies(dims))

    values, x, y = initial(job)
    whole = {name: lies(dims) for name, dims in PARAMETERS[job.program].items()}
    params = {name: jax.device_put(value, whole[name]) for name, value in values.items()}
    data = tuple(jax.device_put(value, lies(DATA[job.program])) for value in (x, y))

    def loss(p: dict[str, Any], x: Any, y: Any) -> Any:
        return jnp.mean(jnp.square(program(p, x, split) - y))

    def plain(p: dict[str, Any], x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x, y)
        return {name: p[name] - LEARNING_RATE * grads[name] for name in p}, value

    by_hand = {"scattered": scattered, "in_rows": in_rows}
    step = by_hand[way](mesh, rules, job) if way in by_hand else plain
    return params, data, jax.jit(step, donate_argnums=0)


def scattered(mesh: Any, rules: dict[str, str], job: NamedJob) -> Any:
    """The step of data parallelism written for one device, with the collectives by hand."""
    axis = rules.get("batch")
    if axis is None:
        raise SystemExit(f"{job.name} splits no batch: there is no sum to scatter.")
    spec = PartitionSpec
    shapes = initial(job)[0]

    def local(p: dict[str, Any], x: Any, y: Any) -> Any:
        def loss(p: dict[str, Any]) -> Any:
            outputs = PROGRAMS[job.program](p, x, lambda array, dims: array)
            return jnp.sum(jnp.square(outputs - y)) / (x.size * mesh.shape[axis])

        value, grads = jax.value_and_grad(loss)(p)
        index = jax.lax.axis_index(axis)

        def updated(param: Any, grad: Any) -> Any:
            rows = param.shape[0] // mesh.shape[axis]
            grad = jax.lax.psum_scatter(grad, axis, tiled=True)
            piece = jax.lax.dynamic_slice_in_dim(param, index * rows, rows)
            return jax.lax.all_gather(piece - LEARNING_RATE * grad, axis, tiled=True)

        return {name: updated(p[name], grads[name]) for name in p}, jax.lax.psum(value, axis)

    whole = {name: spec() for name in shapes}
    data = spec(axis)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(whole, data, data),
        out_specs=(whole, spec()),
        check_vma=False,
    )


def in_rows(mesh: Any, rules: dict[str, str], job: NamedJob) -> Any:
    """The step of a model-parallel block whose residual stream is split over its rows."""
    (axis,) = mesh.axis_names
    spec = PartitionSpec
    dims = {name: text.split() for name, text in PARAMETERS[job.program].items()}
    pieces = {name: spec(*(rules.get(dim) for dim in dims[name])) for name in dims}
    everywhere = [name for name in dims if not any(dim in rules for dim in dims[name])]

    def local(p: dict[str, Any], x: Any, y: Any) -> Any:
        def loss(p: dict[str, Any]) -> Any:
            error = block_in_rows(p, x, axis) - y
            return jnp.sum(jnp.square(error)) / (x.size * mesh.shape[axis])

        value, grads = jax.value_and_grad(loss)(p)
        grads |= {name: jax.lax.psum(grads[name], axis) for name in everywhere}
        after = {name: p[name] - LEARNING_RATE * grads[name] for name in p}
        return after, jax.lax.psum(value, axis)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(pieces, spec(axis), spec(axis)),
        out_specs=(pieces, spec()),
        check_vma=False,
    )


if __name__ == "__main__":
    main()
