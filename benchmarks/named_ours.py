"""Our side: the same programs in the named language; the rule string is all that differs."""

from __future__ import annotations

import argparse
from typing import Any

import optax
from named_jobs import DATA, DEVICES, DIMS, JOBS, LEARNING_RATE, PARAMETERS, NamedJob, initial
from named_protocol import measure

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
    return mn.einsum([attended(q, k, v), p["o"]])


def attended(q: mn.NamedArray, k: mn.NamedArray, v: mn.NamedArray) -> mn.NamedArray:
    k, v = (mn.rename(each, "length", "memory") for each in (k, v))
    out = [*(q.dim(name) for name in ("batch", "heads", "length")), k.dim("memory")]
    weights = mn.softmax(mn.einsum([q * q.dim("d_kv").size ** -0.5, k], out), "memory")
    return mn.einsum([weights, v], q.dims)


def block(p: Params, x: mn.NamedArray) -> mn.NamedArray:
    x = x + attention(p, normalised(x, p["scale_1"]))
    hidden = mn.relu(mn.einsum([normalised(x, p["scale_2"]), p["wi"]]))
    return x + mn.einsum([hidden, p["wo"]])


def block_in_rows(p: Params, x: mn.NamedArray) -> mn.NamedArray:
    """The same, with what lies between the products split over its ``rows`` by a rule of their own.

    Renaming a dim where it goes in and out of the products is all that it takes: norms and sums are
    then of a piece on each device, and not of everything on all of them (sequence parallelism,
    Korthikanti et al. 2022). Queries, keys and values are one product, so that what comes back
    from them is summed once. The result is split too, and so is the loss.
    """
    x = split(x)
    attended = attention_of_one_product(p, normalised(x, p["scale_1"]))
    x = x + mn.einsum([attended, p["o"]], rename=OUT)
    hidden = mn.relu(mn.einsum([normalised(x, p["scale_2"]), p["wi"]], rename=IN))
    return x + mn.einsum([hidden, p["wo"]], rename=OUT)


IN, OUT = {"rows": "batch"}, {"batch": "rows"}


def split(x: mn.NamedArray) -> mn.NamedArray:
    return mn.rename(x, OUT)


def attention_of_one_product(p: Params, x: mn.NamedArray) -> mn.NamedArray:
    kernel = mn.stack([p[name] for name in "qkv"], "which")
    batch, heads, d_kv = mn.Dim("batch", x.dim("rows").size), *p["q"].dims[1:]
    out = [kernel.dim("which"), batch, heads, x.dim("length"), d_kv]
    return attended(*mn.unstack(mn.einsum([x, kernel], out, rename=IN), "which"))


PROGRAMS = {"mlp": mlp, "block": block}
IN_ROWS = {"block": block_in_rows}


def dims(job: NamedJob, text: str) -> list[mn.Dim]:
    return [mn.Dim(name, DIMS[job.program][name]) for name in text.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--zero", type=int, default=0, help="1: each device updates its piece")
    parser.add_argument("--in-rows", action="store_true", help="split what is between products")
    given = parser.parse_args()
    mw.virtual_devices(DEVICES)
    job = JOBS[given.job]
    trainer, batch = make(job, given.zero, given.in_rows)
    state = [trainer.init()]

    def one() -> Any:
        state[0], logs = trainer.step(state[0], batch)
        return logs["loss"]

    way = "_in_rows" if given.in_rows else ""
    measure(f"ours_zero_{given.zero}{way}", job, one, float)


def make(job: NamedJob, zero: int, in_rows: bool = False) -> tuple[mw.Trainer, Any]:
    """The trainer, and the batch where it lies."""
    program = (IN_ROWS if in_rows else PROGRAMS)[job.program]
    rules = f"{job.layout};rows:all" if in_rows else job.layout

    def loss(p: Params, batch: tuple[mn.NamedArray, mn.NamedArray]) -> mn.NamedArray:
        x, y = batch
        return mn.reduce_mean(mn.square(program(p, x) - (split(y) if in_rows else y)))

    values, *data = initial(job)
    params = {
        name: mn.named(values[name], dims(job, text))
        for name, text in PARAMETERS[job.program].items()
    }
    names = DATA[job.program]
    placement = mw.Placement.of(
        mw.create_mesh({dim.name: dim.size for dim in mn.as_dims(job.mesh)}),
        rules=rules,
        zero=zero,
    )
    trainer = mw.Trainer(
        mw.named_program(loss, params, optax.sgd(LEARNING_RATE), batch=(names, names)), placement
    )
    return trainer, trainer.put(tuple(data))


if __name__ == "__main__":
    main()
