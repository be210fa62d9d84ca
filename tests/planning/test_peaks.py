"""The planner's own peak: beside the compiler's, and what it is made of."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import shapes as shape

import meshwright as mw
from meshwright.jaxprs.names import Argument
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.search import Choices, cost
from meshwright.planning.search.buffers import buffers_on_cpu, buffers_on_tpu
from meshwright.planning.search.compact import compact
from meshwright.planning.search.cost import bytes_by_kind
from meshwright.planning.search.facts import batch_dim
from meshwright.planning.search.lifetimes import Lifetime
from meshwright.planning.search.moments import _Events, _undominated
from meshwright.planning.search.setting import setting_of
from meshwright.planning.traced_graph import graph_of, graph_of_step
from meshwright.targets.hardware import hardware_of
from meshwright.targets.target import Target

WIDTH, HEADS, VOCAB, LENGTH, ROWS = 128, 4, 512, 64, 64
DATA = {"batch": 8}
BOTH = {"batch": 2, "model": 4}
SPLIT = {"blocks/.*/up": [None, "model"], "blocks/.*/down": ["model", None]}


def normed(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def block(weights, x):
    h = normed(x, weights["g"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, weights[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    actual = jnp.einsum("bhts,bshk->bthk", scores, v)
    x = x + jnp.einsum("bthk,hkd->btd", actual, weights["o"])
    return x + jax.nn.gelu(normed(x, weights["g"]) @ weights["up"]) @ weights["down"]


def transformer(again=False, layers=None):
    """Of two blocks, or of a loop over so many layers."""
    head = WIDTH // HEADS
    weights_of_block = dict.fromkeys("qkv", shape(WIDTH, HEADS, head))
    weights_of_block |= {"o": shape(HEADS, head, WIDTH), "g": shape(WIDTH)}
    weights_of_block |= {"up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
    run = jax.checkpoint(block) if again else block

    def loss(weights, ids):
        x = weights["embed"][ids]
        if layers:
            x, _ = jax.lax.scan(lambda x, one: (run(one, x), None), x, weights["blocks"])
        else:
            for one in weights["blocks"]:
                x = run(one, x)
        result = jax.nn.log_softmax(x @ weights["head"])
        return -jnp.mean(jnp.take_along_axis(result, ids[..., None], -1))

    ends = {"embed": shape(VOCAB, WIDTH), "head": shape(WIDTH, VOCAB)}
    stacked = {path: shape(layers, *one.shape) for path, one in weights_of_block.items() if layers}
    weights = {**ends, "blocks": stacked if layers else [weights_of_block, weights_of_block]}
    return mw.jax_program(loss, weights, optax.adam(1e-3)), shape(ROWS, LENGTH, dtype="int32")


def layers_by_number(read):
    """Four layers, which a loop of Python reads out of stacks."""

    def loss(weights, x):
        for number in range(4):
            up, down = (read(weights[name], number) for name in ("up", "down"))
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    weights = {"up": shape(4, 128, 512), "down": shape(4, 512, 128)}
    return mw.jax_program(loss, weights, optax.adam(1e-3)), shape(64, 128)


READS = {
    "by number": lambda stack, number: stack[number],
    "looked up": lambda stack, number: jnp.take(stack, number, axis=0),
}


def perceptron():
    sizes = [256, 1024, 1024, 1024, 64]

    def loss(weights, batch):
        x, y = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    weights = [shape(*pair) for pair in itertools.pairwise(sizes)]
    batch = shape(8192, sizes[0]), shape(8192, sizes[-1])
    return mw.jax_program(loss, weights, optax.sgd(0.1)), batch


CASES = {
    "transformer": (transformer, DATA, {}, {}, 0.05),
    "computed again": (lambda: transformer(again=True), DATA, {}, {}, 0.05),
    "loop": (lambda: transformer(layers=4), DATA, {}, {}, 0.1),
    "perceptron": (perceptron, DATA, {}, {"zero": 1}, 0.05),
    "by number": (lambda: layers_by_number(READS["by number"]), DATA, {}, {}, 0.05),
    "looked up": (lambda: layers_by_number(READS["looked up"]), DATA, {}, {}, 0.1),
    "looked up in pieces": (
        lambda: layers_by_number(READS["looked up"]),
        DATA,
        {},
        {"zero": 3},
        0.15,
    ),
    "split": (transformer, BOTH, SPLIT, {}, 0.1),
    "pieces": (transformer, DATA, {}, {"zero": 3}, 0.1),
    "pieces in a loop": (lambda: transformer(layers=4), DATA, {}, {"zero": 3}, 0.1),
    "blocks in a loop": (lambda: transformer(layers=8), DATA, {}, {"remat": "block"}, 0.1),
    "products in a loop": (lambda: transformer(layers=8), DATA, {}, {"remat": "selective"}, 0.15),
}
# XLA for CPUs of JAX 0.11 holds less than that of JAX 0.10, which the rules are made for: 17.3 in
# place of 24.4 MB, and 18.2 in place of 20.0.
LESS_SINCE_0_11 = {"computed again": 1.4, "pieces": 1.15}
FULL = [
    pytest.param(name, marks=pytest.mark.full)
    for name in (
        *("transformer", "split", "pieces", "loop", "pieces in a loop", "looked up"),
        "looked up in pieces",
        *("blocks in a loop", "products in a loop"),
    )
]


def graph(program, batch):
    return graph_of_step(abstract_step(program, batch, mw.Sharded(mw.Mesh({"batch": 1}))))


@pytest.mark.parametrize("name", ["computed again", "perceptron", "by number", *FULL])
def test_the_planners_peak_is_near_the_compilers(name):
    """Within 5 %, or 10 % in a loop and where an array is split both ways."""
    build, axes, layouts, how, off = CASES[name]
    program, batch = build()
    mesh = mw.Mesh(axes)
    strategy = mw.Sharded(mesh, layouts, unmatched="replicate", **how)
    report = mw.dry_run(program, batch, strategy=strategy, target="cpu:8", blocks="whole")
    step = graph(program, batch)
    rows = batch_dim(step)
    assert rows is not None
    rules = {step.dims[rows].family: ["batch"]}
    if layouts:
        (up,) = (t.dims[1] for t in step.tensors if t.path == "blocks/0/up")
        assert up is not None
        rules[step.dims[up].family] = ["model"]
    choices = Choices(zero=how.get("zero", 0), remat=how.get("remat", "none"))
    result = cost(step, mesh.axes, rules, choices, target="cpu:8").peak_bytes
    if name in LESS_SINCE_0_11 and jax.__version_info__ >= (0, 11):
        assert report.peak_bytes <= result <= LESS_SINCE_0_11[name] * report.peak_bytes
        return
    assert result == pytest.approx(report.peak_bytes, rel=off)


@pytest.mark.full
@pytest.mark.targets
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_level_3_on_a_tpu_is_near_the_compilers(dtype):
    """Large kernels beside few rows: all of them at once would be most of the peak."""
    estimate, compiled = on_a_tpu(deep(16, dtype), zero=3)
    assert 0.7 * compiled < estimate < 1.15 * compiled


@pytest.mark.full
@pytest.mark.targets
def test_the_peak_of_micro_batches_on_a_tpu_is_near_the_compilers():
    """The compiler converts all kernels before its loop; without them it would be 0.7."""
    estimate, compiled = on_a_tpu(deep(16, "bfloat16", rows=4096), zero=2, accumulate=4)
    assert 0.9 * compiled < estimate < 1.1 * compiled


def on_a_tpu(built, **how):
    """The peak by the planner's model, and that of the compiler."""
    program, batch = built
    strategy = mw.Sharded(mw.Mesh({"batch": 4}), {}, unmatched="replicate", **how)
    options = {"strategy": strategy, "target": "v5e:2x2", "blocks": "whole"}
    estimate = mw.dry_run(program, batch, compile=False, **options)
    return estimate.peak_bytes, mw.dry_run(program, batch, **options).peak_bytes


@pytest.mark.parametrize(("zero", "copies"), [(0, True), (2, True), (3, False)])
def test_micro_batches_in_a_loop_keep_the_casts_of_parameters(zero, copies):
    casts = 4 * 1024 * 1024 * 2  # of all kernels
    assert cast_bytes("bfloat16", Choices(zero, accumulate=2)) == (casts if copies else 0)
    assert cast_bytes("float32", Choices(zero, accumulate=2)) == 0
    assert cast_bytes("bfloat16", Choices(zero)) == 0


def cast_bytes(dtype, choices):
    """What casts of parameters take at the peak."""
    target = Target.of("v5p:2x2x2")
    problem = compact(graph(*deep(4, dtype)), target.platform, target.kind)
    setting = setting_of((("batch", 8),), target, hardware_of(target))
    return bytes_by_kind(problem, setting, {problem.batch: 1}, choices).get("cast", 0)


def deep(layers, dtype, width=1024, rows=64):
    def loss(weights, x):
        y = x.astype(dtype)
        for number, w in enumerate(weights):
            with jax.named_scope(f"layer_{number}"):
                y = jnp.tanh(y @ w.astype(dtype))
        return jnp.mean(y.astype("float32") ** 2)

    program = mw.jax_program(loss, [shape(width, width)] * layers, optax.adam(1e-3))
    return program, shape(rows, width)


@pytest.mark.parametrize("target", ["v5p:2x2x2", "h100:8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_level_3_gathers_kernels_one_after_the_other(target, dtype):
    """Each layer more holds its pieces and its rows more, and no whole kernel."""
    peaks = []
    for layers in (4, 8):
        step = graph(*deep(layers, dtype))
        rows = step.dims[batch_dim(step) or 0].family
        peaks.append(
            cost(
                step, (("batch", 8),), {rows: ["batch"]}, Choices(zero=3), target=target
            ).peak_bytes
        )
    kernel = 1024 * 1024 * (2 if dtype == "bfloat16" else 4)
    pieces = 1024 * 1024 * 4 * 4 // 8  # the parameter, its gradient and two slots
    activations = 4 * 64 * 1024 * 4 // 8  # of each layer, activations in any type
    assert peaks[1] - peaks[0] <= 4 * (pieces + activations)
    assert peaks[0] >= kernel


# What is written


def spec(dims):
    *sizes, last = dims
    return shape(*sizes, dtype=last) if isinstance(last, str) else shape(*dims)


def traced(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*map(spec, shapes))
    roles = ["input", *["parameter"] * (len(shapes) - 1)]
    arguments = [Argument(f"a{i}", role) for i, role in enumerate(roles)]
    return graph_of(jaxpr, arguments)


LAYERS = 16


def layers_of(params, stacked):
    return params["w"] if stacked else [params[f"w{number}"] for number in range(LAYERS)]


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_level_3_holds_layers_that_are_read_by_number_as_it_does_single_ones(target, name):
    """A loop of Python over a stack: each layer is gathered where it is read, and its gradient is
    summed at once. libtpu holds 202 and 159 MB; the estimate was 641 MB of the stack."""

    def peak(stacked):
        def loss(params, x):
            layers = layers_of(params, stacked)
            for number in range(LAYERS):
                read = READS[name] if stacked else list.__getitem__
                x = x + jnp.tanh(x @ read(layers, number))
            return jnp.mean(x**2)

        single = {f"w{number}": shape(2048, 2048) for number in range(LAYERS)}
        params = {"w": shape(LAYERS, 2048, 2048)} if stacked else single
        program = mw.jax_program(loss, params, optax.adam(1e-3))
        strategy = mw.Sharded(mw.Mesh({"batch": 8}), unmatched="replicate", zero=3)
        batch = shape(1024, 2048)
        return mw.dry_run(
            program, batch, strategy=strategy, target=target, compile=False
        ).peak_bytes

    assert 0.95 < peak(stacked=True) / peak(stacked=False) < 1.3


def kinds_on_cpu(step):
    buffers, _ = buffers_on_cpu(step)
    return sorted(step.operations[buffer.start].kind for buffer in buffers)


def kinds_on_tpu(step):
    return sorted(step.operations[buffer.start].kind for buffer in buffers_on_tpu(step, False))


def test_elementwise_work_is_written_for_a_product():
    step = traced(lambda x, w: (x * 2 + 1) @ w, (8, 4), (4, 6))
    assert kinds_on_cpu(step) == ["add", "dot_general"]
    assert kinds_on_tpu(step) == ["dot_general"]


def test_what_is_expensive_is_not_done_twice():
    cheap = traced(lambda x, w: ((x @ w * 2) ** 2).sum(0), (8, 4), (4, 6))
    costly = traced(lambda x, w: ((y := jnp.exp(x @ w)) * (y + 1)).sum(0), (8, 4), (4, 6))
    assert kinds_on_cpu(cheap) == ["dot_general", "reduce_sum"]
    assert kinds_on_cpu(costly) == ["dot_general", "exp", "reduce_sum"]


def test_a_reduction_reads_what_others_read_too_from_memory():
    alone = traced(lambda x, w: ((x @ w) * 2).sum(0), (8, 4), (4, 6))
    assert kinds_on_cpu(alone) == ["dot_general", "reduce_sum"]
    shared = traced(lambda x, w: (y := x @ w * 2).sum(0) * (y + 1), (8, 4), (4, 6))
    assert "mul" in kinds_on_cpu(shared)


def test_level_3_keeps_what_a_product_reads_in_bfloat16():
    def loss(x, w, v):
        weights = jax.nn.softmax(jnp.einsum("bij,jk->bik", x, w)).astype("bfloat16")
        return jnp.sum((jnp.einsum("bij,bkj->bik", weights, x.astype("bfloat16")) @ v) ** 2)

    step = traced(jax.grad(loss, argnums=(1, 2)), (8, 4, 4), (4, 4), (4, 6, "bfloat16"))
    plain, compact = (
        sum(step.tensors[buffer.tensor].itemsize == 2 for buffer in buffers_on_tpu(step, keeps))
        for keeps in (False, True)
    )
    assert compact == plain + 1


def test_level_3_writes_logits_in_full_and_on_some_chips_their_gradient():
    """As libtpu does for a language model of bfloat16: level 0 has neither."""

    def loss(x, w, v):
        logits = ((x @ w) @ v).astype("float32")
        return jnp.mean(jax.nn.logsumexp(logits, -1))

    sizes = (8, 4, "bfloat16"), (4, 6, "bfloat16"), (6, 32, "bfloat16")
    step = traced(jax.grad(loss, argnums=(1, 2)), *sizes)
    large = {}
    for kind, keeps in (("", False), ("v5p", True), ("v5e", True)):
        written = [step.tensors[buffer.tensor] for buffer in buffers_on_tpu(step, keeps, kind)]
        large[kind] = sorted(x.itemsize for x in written if x.shape == (8, 32))
    assert large == {"": [2], "v5p": [2, 4], "v5e": [4]}


def test_what_a_block_computes_again_is_known_for_the_same():
    def loss(x, w):
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)(x, w) ** 2)

    step = traced(jax.grad(loss, argnums=1), (8, 4), (4, 4))
    plain = traced(
        jax.grad(lambda x, w: jnp.sum((jnp.tanh(x @ w) @ w) ** 2), argnums=1), (8, 4), (4, 4)
    )
    assert any(tensor.twin is not None for tensor in step.tensors)
    assert kinds_on_cpu(step) == kinds_on_cpu(plain)
    assert kinds_on_tpu(step).count("dot_general") > kinds_on_tpu(plain).count("dot_general")


@pytest.mark.parametrize("seed", range(3))
def test_moments_that_another_is_as_full_as_are_left_out(seed):
    drawn = np.random.default_rng(seed).integers(0, 3, (80, 40)).astype(np.int32)
    rows = np.concatenate([drawn, drawn[:5], np.minimum(drawn[:30], drawn[1:31] + 1)])
    distinct = np.unique(rows, axis=0)
    alone = [row.tobytes() for row in distinct if ((distinct >= row).all(axis=1).sum() == 1)]
    assert sorted(row.tobytes() for row in _undominated(rows)) == sorted(alone)


@pytest.mark.parametrize("seed", range(5))
def test_of_moments_beside_each_other_only_the_fullest_are_counted(seed):
    drawn, length, pieces = np.random.default_rng(seed), 40, 5
    spans = np.sort(drawn.integers(0, length, (12, 2)))
    lives = [Lifetime(int(drawn.integers(pieces)), int(a), int(b)) for a, b in spans]
    running = drawn.choice([-1, -1, 0, 1], length)
    counts = np.zeros((length, pieces), int)
    for life in lives:
        counts[life.first : life.last + 1, life.piece] += 1
    rows = np.concatenate([counts, running[:, None] == [0, 1]], axis=1)

    events = _Events.of(lives)
    places = events.fullest(running)
    np.testing.assert_array_equal(events.sums(places, pieces, np.int16), counts[places])
    assert all((rows[places] >= row).all(axis=1).any() for row in rows)
    assert len(places) < length
