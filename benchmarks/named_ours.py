"""Our side: the same programs in the named language; the rule string is all that differs."""

from __future__ import annotations

from typing import Any

import jax
from named_jobs import DATA, DEVICES, DIMS, LEARNING_RATE, PARAMETERS, NamedJob, initial
from named_protocol import job_from_arguments, measure

import meshwright as mw
import meshwright.named as mn

Params = dict[str, mn.NamedArray]


def mlp(p: Params, x: mn.NamedArray) -> mn.NamedArray:
    return mn.einsum([mn.relu(mn.einsum([x, p["w"]])), p["v"]])


def normalised(x: mn.NamedArray, scale: mn.NamedArray) -> mn.NamedArray:
    x = x - mn.reduce_mean(x, "d_model")
    return x * mn.rsqrt(mn.reduce_mean(mn.square(x), "d_model") + 1e-6) * scale


def attention(p: Params, x: mn.NamedArray) -> mn.NamedArray:
    q, k, v = (mn.einsum([x, p[name]]) for name in "qkv")
    k, v = (mn.rename(each, "length", "memory") for each in (k, v))
    out = [*(d for d in q.dims if d.name != "d_kv"), k.dim("memory")]
    weights = mn.softmax(mn.einsum([q * q.dim("d_kv").size ** -0.5, k], out), "memory")
    return mn.einsum([mn.einsum([weights, v], q.dims), p["o"]])


def block(p: Params, x: mn.NamedArray) -> mn.NamedArray:
    x = x + attention(p, normalised(x, p["scale_1"]))
    hidden = mn.relu(mn.einsum([normalised(x, p["scale_2"]), p["wi"]]))
    return x + mn.einsum([hidden, p["wo"]])


PROGRAMS = {"mlp": mlp, "block": block}


def dims(job: NamedJob, text: str) -> list[mn.Dim]:
    return [mn.Dim(name, DIMS[job.program][name]) for name in text.split()]


def main() -> None:
    job = job_from_arguments(__doc__)
    mw.virtual_devices(DEVICES)
    axes = {dim.name: dim.size for dim in mn.as_dims(job.mesh)}
    program = PROGRAMS[job.program]

    def loss(p: Params, x: mn.NamedArray, y: mn.NamedArray) -> Any:
        return mn.reduce_mean(mn.square(program(p, x) - y)).array

    def step(p: Params, x: mn.NamedArray, y: mn.NamedArray) -> tuple[Params, Any]:
        value, grads = jax.value_and_grad(loss)(p, x, y)
        return {name: p[name] - LEARNING_RATE * grads[name] for name in p}, value

    values, *data = initial(job)
    with mn.rules(job.layout, mw.create_mesh(axes)):
        shapes = {name: dims(job, text) for name, text in PARAMETERS[job.program].items()}
        params = {name: mn.named(values[name], shape) for name, shape in shapes.items()}
        x, y = (mn.named(value, dims(job, DATA[job.program])) for value in data)
        compiled = jax.jit(step, donate_argnums=0)
        state = [params]

        def one() -> Any:
            state[0], value = compiled(state[0], x, y)
            return value

        measure("ours", job, one, float)


if __name__ == "__main__":
    main()
