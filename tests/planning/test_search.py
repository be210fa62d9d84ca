"""The planner's cost model by closed forms, and its search by straight enumeration."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_graphs import Builder, mlp, transformer

import meshwright as mw
from meshwright.errors import DivisibilityError, LayoutError, TargetError
from meshwright.hlo.links import links_of
from meshwright.layouts.zero import share_out
from meshwright.planning.abstract_step import abstract_step
from meshwright.planning.search import Choices, Layouts, Space, cost, search
from meshwright.planning.search.compact import compact
from meshwright.planning.search.facts import facts_of
from meshwright.planning.search.meshes import meshes
from meshwright.planning.search.setting import setting_of
from meshwright.planning.search.terms import Lay, replicas_sharing
from meshwright.planning.traced_graph import graph_of_step
from meshwright.targets.hardware import Hardware, Link, hardware_of
from meshwright.targets.target import Target

# Round numbers, so that times can be read: 1 TFLOP/s, 1 GB/s of memory, 100 MB/s of links, 1 us.
ROUND = Hardware(
    "round",
    peak_flops_per_s=(("float32", 1e12), ("bfloat16", 1e12)),
    memory_bandwidth_bytes_per_s=1e9,
    links=(Link("nvlink", "switch", 1e8, 1e-6),),
)
H100 = Target.of("h100:8")


def bytes_of(result, collective):
    return sum(term.bytes_per_device for term in result.terms if term.collective == collective)


# The cost model


@pytest.mark.parametrize(
    ("axes", "rules", "elements"),
    [
        ({"all": 8}, {"batch": ["all"]}, 2 * 16 * 32),
        ({"all": 8}, {"hidden": ["all"]}, 64 * 16),  # without dL/dx half of 2 b io
        ({"rows": 4, "cols": 2}, {"batch": ["rows"], "hidden": ["cols"]}, 16 * 16 + 2 * 16 * 16),
        (
            {"rows": 2, "cols": 2, "planes": 2},
            {"batch": ["rows"], "hidden": ["cols"], "io": ["planes"]},
            2 * 32 * 16 + 32 * 8 + 2 * 8 * 16,
        ),
    ],
)
def test_two_layers_talk_as_the_paper_says(axes, rules, elements):
    result = cost(mlp(adam=False), tuple(axes.items()), rules, target=H100)
    assert bytes_of(result, "all-reduce") == 4 * elements
    assert bytes_of(result, "all-gather") == 0


def test_an_all_reduce_takes_what_the_ring_says():
    result = cost(mlp(adam=False), (("all", 8),), {"batch": ["all"]}, target=H100, hardware=ROUND)
    sum_s = 2 * 7 / 8 * (4 * 16 * 32) / 1e8 + 14 * 1e-6
    assert result.communication_s == pytest.approx(2 * sum_s)


def test_work_that_no_axis_shares_takes_its_whole_time():
    graph, axes = mlp(4096, 1024, 4096, adam=False), (("rows", 4), ("cols", 2))
    hardware = replace(ROUND, memory_bandwidth_bytes_per_s=1e18)  # arithmetic alone counts
    flops = 5 * 2 * 4096 * 1024 * 4096
    for rules, shared in [
        ({}, 1),
        ({"batch": ["rows"]}, 4),
        ({"batch": ["rows"], "hidden": ["cols"]}, 8),
        ({"batch": ["rows", "cols"]}, 8),
    ]:
        result = cost(graph, axes, rules, target=H100, hardware=hardware)
        dots = sum(term.compute_s for term in result.terms if term.kind == "dot_general")
        assert dots == pytest.approx(flops / shared / 1e12)


def test_memory_traffic_bounds_what_has_little_arithmetic():
    graph, axes = mlp(64, 16, 32, adam=False), (("rows", 4),)
    hardware = replace(ROUND, peak_flops_per_s=(("float32", 1e18),))
    result = cost(graph, axes, {"batch": ["rows"]}, target=H100, hardware=hardware)
    first = next(term for term in result.terms if term.kind == "dot_general")
    moved = 4 * (64 / 4 * 16 + 16 * 32 + 64 / 4 * 32)  # bytes of x, w and h in one device
    assert first.compute_s == pytest.approx(moved / 1e9)


def test_the_peak_is_what_lives_at_once():
    b = Builder()
    b.dim("batch", 8)
    b.dim("in", 4)
    b.dim("out", 2)
    b.tensor("x", "batch in", "input")  # 128 bytes, always there
    b.tensor("w", "in out", "parameter")  # 32 bytes, always there
    b.dot("x w", "y", "batch out", "in")  # 64 bytes till the next
    b.add("sort", "y", "z", "batch out", whole="out")  # 64 bytes
    graph = b.graph()
    whole = cost(graph, (("a", 2),), {}, target=H100)
    rows = cost(graph, (("a", 2),), {"batch": ["a"]}, target=H100)
    columns = cost(graph, (("a", 2),), {"out": ["a"]}, target=H100)
    assert whole.peak_bytes == 128 + 32 + 64 + 64
    assert rows.peak_bytes == 64 + 32 + 32 + 32
    assert columns.peak_bytes == 128 + 16 + 32 + 32 + 64  # y is gathered for the sort
    assert bytes_of(columns, "all-gather") == 64


def test_a_joint_is_gathered_where_the_axes_part():
    graph = transformer(blocks=1)
    axes = (("a", 2),)
    nothing = cost(graph, axes, {"batch": ["a"]}, target=H100)
    apart = cost(graph, axes, {"length": ["a"]}, target=H100)
    assert bytes_of(nothing, "all-gather") == 0
    rows = 8 * 128 * 256 * 2  # of the residual stream, in bytes
    assert bytes_of(apart, "all-gather") == 4 * rows  # keys and values, forward and backward


def test_kinds_of_arrays_are_told_apart():
    graph = mlp()
    kinds = dict(zip((t.path for t in graph.tensors), facts_of(graph).kinds, strict=True))
    assert kinds["w'"] == kinds["v'"] == "gradient"
    assert kinds["w+"] == kinds["w.m+"] == "update"
    assert kinds["h"] == kinds["dh"] == "activation"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_shares_state_out(zero):
    graph = mlp(64, 256, 512)
    result = cost(graph, (("a", 8),), {"batch": ["a"]}, Choices(zero), target=H100)
    weights = 2 * 4 * 256 * 512
    assert bytes_of(result, "reduce-scatter" if zero else "all-reduce") == weights
    assert bytes_of(result, "all-gather") == {0: 0, 1: 1, 2: 1, 3: 2}[zero] * weights
    without = cost(graph, (("a", 8),), {"batch": ["a"]}, target=H100)
    assert (result.peak_bytes < without.peak_bytes) == (zero > 0)


def test_pieces_are_shared_out_as_the_step_does():
    """Against zero.share_out, for layouts of every kind."""
    graph, axes = mlp(64, 96, 6000), (("a", 2), ("b", 4))
    problem = compact(graph)
    mesh = mw.Mesh(dict(axes))
    setting = setting_of(axes, H100, hardware_of(H100))
    names = {0: (), 1: ("a",), 2: ("b",), 3: ("a", "b")}
    units = {unit.family: place for place, unit in enumerate(problem.units)}
    for batch, io, hidden in itertools.product(range(4), repeat=3):
        masks = {units["batch"]: batch, units["io"]: io, units["hidden"]: hidden}
        if batch & io or batch & hidden or io & hidden:
            continue
        arrays = {unit: np.array([mask]) for unit, mask in masks.items()}
        lay = Lay(problem, setting, Choices(1), arrays, 1)
        layout = mw.Layout([names[io] or None, names[hidden] or None], mesh)
        piece = next(p for p in problem.pieces if p.kind == "parameter" and p.shape[0] == 96)
        shares = share_out(layout, (96, 6000), names[batch])
        replicas = mesh.size and setting.size_of[batch]
        assert int(replicas_sharing(lay, piece)[0]) == (1 if shares is None else replicas)


def test_micro_batches_keep_less_and_recomputing_too():
    graph = transformer(batch=32, blocks=4, vocab=64)
    plain, four, again, some = (
        cost(graph, (("a", 2),), {"batch": ["a"]}, choices, target=H100)
        for choices in (
            Choices(),
            Choices(accumulate=4),
            Choices(remat="block"),
            Choices(remat="selective"),
        )
    )
    assert four.peak_bytes < plain.peak_bytes
    assert again.peak_bytes < plain.peak_bytes
    assert plain.time_s is not None
    assert four.time_s is not None
    assert again.time_s is not None
    assert four.time_s > plain.time_s
    forward = sum(t.compute_s for t in again.terms) - sum(t.compute_s for t in plain.terms)
    assert 0.2 * plain.compute_s < forward < 0.5 * plain.compute_s
    assert some.time_s is not None
    assert plain.time_s < some.time_s < again.time_s
    assert plain.peak_bytes > some.peak_bytes > again.peak_bytes


def test_what_cannot_be_is_refused():
    graph, axes = mlp(), (("a", 3), ("b", 2))
    with pytest.raises(DivisibilityError, match=r"'batch' \(size 64\) does not divide over axis"):
        cost(graph, axes, {"batch": ["a"]}, target=H100)
    with pytest.raises(LayoutError, match="'batch' and 'hidden' meet in one array or operation"):
        cost(graph, axes, {"batch": ["b"], "hidden": ["b"]}, target=H100)
    with pytest.raises(LayoutError, match="family of dims 'rows'; known are batch, hidden, io"):
        cost(graph, axes, {"rows": ["b"]}, target=H100)
    with pytest.raises(LayoutError, match="axis 'c', which the mesh does not have"):
        cost(graph, axes, {"batch": ["c"]}, target=H100)
    with pytest.raises(TargetError, match=r"links.shared.bytes_per_s.*calibrate\('cpu:8'\)"):
        search(graph, Target.of("cpu:8"), hardware_of("cpu:8"))


def test_meshes_of_any_number_of_devices():
    def sizes(text, **more):
        target = Target.of(text)
        result = meshes(target, hardware_of(target), **more)
        return [tuple(size for _, size in axes) for axes in result]

    assert sizes("h100:8", fewer=False) == [(8,), (4, 2), (2, 2, 2)]
    assert sizes("h100:6") == [(6,), (3, 2), (5,), (4,), (2, 2), (3,), (2,), ()]
    assert (8, 2) in sizes("h200:2x8", fewer=False)
    assert (2, 8) in sizes("h200:2x8", fewer=False)
    assert max(map(len, sizes("v5e:4x4"))) == 2  # a torus of two dims
    assert (2, 4, 4) in sizes("v5e:2x(4x4)", fewer=False)  # between slices, and two dims of each
    for text in ("v5p:8x8x8", "v2:16x16"):
        assert len(sizes(text)) < 200


def test_links_are_those_of_the_estimate():
    axes = (("a", 4), ("b", 2))
    target = Target.of("h200:2x8")
    setting = setting_of(axes, target, hardware_of(target))
    slow, fast = (link.bytes_per_s for link in links_of(target, hardware_of(target), axes))
    assert slow
    assert fast
    assert setting.rate_s_per_byte["all-gather"][1] == pytest.approx(3 / 4 / slow)
    assert setting.rate_s_per_byte["all-gather"][2] == pytest.approx(1 / 2 / fast)


# The search against straight enumeration


def enumerated(graph, target, hardware, space, limit_bytes, objective, mesh_sizes):
    """The best of everything, by nothing but the public cost()."""
    families = {}
    for dim in graph.dims:
        families.setdefault(dim.family, dim.size)
    best = float("inf")
    every = itertools.product(space.zero, space.accumulate, space.remat)
    for sizes, choices in itertools.product(mesh_sizes, list(every)):
        axes = tuple(zip("abc", sizes, strict=False))
        subsets = [
            subset
            for count in range(len(axes) + 1)
            for subset in itertools.combinations([name for name, _ in axes], count)
        ]
        for along in itertools.product(subsets, repeat=len(families)):
            rules = {f: subset for f, subset in zip(families, along, strict=True) if subset}
            try:
                result = cost(
                    graph, axes, rules, Choices(*choices), target=target, hardware=hardware
                )
            except LayoutError:
                continue
            if limit_bytes is None or result.peak_bytes <= limit_bytes:
                best = min(best, result.time_s if objective == "time" else result.peak_bytes)
    return best


def small_graph(seed):
    """A chain of products, sums and sorts over three to six dims, with weights to train."""
    draw = random.Random(seed)
    b = Builder()
    b.dim("batch", draw.choice([8, 12, 64]))
    names = [b.dim(f"d{i}", draw.choice([6, 16, 64, 256, 1024])) for i in range(draw.randint(2, 5))]
    b.tensor("x", f"batch {names[0]}", "input")
    last, made = "x", []
    for i, (before, after) in enumerate(itertools.pairwise(names)):
        b.tensor(f"w{i}", f"{before} {after}", "parameter")
        made.append((last, i, before, after))
        last = b.dot(f"{last} w{i}", f"h{i}", f"batch {after}", before)
        if draw.random() < 0.3:
            last = b.add("sort", last, f"s{i}", f"batch {after}", whole=after)
        if draw.random() < 0.5:
            last = b.add("max", last, f"r{i}", f"batch {after}")
    slope = last
    for taken, i, before, after in reversed(made):
        b.dot(f"{taken} {slope}", f"w{i}'", f"{before} {after}", "batch")
        if i:
            slope = b.dot(f"{slope} w{i}", f"g{i}", f"batch {before}", after)
        if draw.random() < 0.5:
            b.adam(f"w{i}")
    return b.graph()


def compare(seed, objective):
    """The search on the meshes of one small graph beside enumeration."""
    graph = small_graph(seed)
    count = len({dim.family for dim in graph.dims})
    sizes = [(2, 2, 2)] if count <= 3 else [(4, 2)] if seed % 2 else [(8,), (2, 2)]
    zero, accumulate = ((0, 2), (1, 2)) if count <= 3 else ((0, 3) if count == 4 else (1,), (1,))
    space = Space(zero=zero, accumulate=accumulate, remat=("none",))

    def best(objective, limit):
        values = []
        for size in sizes:
            axes = tuple(zip("abc", size, strict=False))
            result = search(
                graph,
                H100,
                ROUND,
                objective=objective,
                limit_bytes=limit,
                space=replace(space, axes=axes),
                limit_s=60,
            )
            assert result.is_proven
            costs = [candidate.cost for candidate in result.candidates[:1]]
            assert all(limit is None or cost.peak_bytes <= limit for cost in costs)
            values += [c.time_s if objective == "time" else c.peak_bytes for c in costs]
        return min(values)

    # A limit that not every layout keeps, and some do.
    limit = None if objective == "memory" else int(best("memory", None) * 1.2)
    expected = enumerated(graph, H100, ROUND, space, limit, objective, sizes)
    return expected, best(objective, limit)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_faster_by_enumeration(seed):
    expected, actual = compare(seed, "time")
    assert expected * (1 - 1e-9) <= actual <= 1.02 * expected


@pytest.mark.parametrize("seed", [2, 3, 6, 7, 9])
def test_nothing_is_smaller_by_enumeration(seed):
    expected, actual = compare(seed, "memory")
    assert expected <= actual <= 1.02 * expected


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20, 60))
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_nothing_is_better_by_enumeration_of_many(seed, objective):
    expected, actual = compare(seed, objective)
    assert expected * (1 - 1e-9) <= actual <= 1.02 * expected


def test_remat_is_proven_where_it_spares_a_loop_its_stacks():
    """A loop that stacks less writes less, so that what computes more may be the fastest."""

    def loss(weights, x):
        def turn(x, w):
            return x + jnp.exp(-(jnp.tanh(jnp.sin(x @ w)) ** 2)), None

        return jnp.mean(jax.lax.scan(turn, x, weights)[0] ** 2)

    program = mw.jax_program(loss, jax.ShapeDtypeStruct((8, 64, 64), "float32"), optax.sgd(0.1))
    batch = jax.ShapeDtypeStruct((4096, 64), "float32")
    graph = graph_of_step(abstract_step(program, batch, mw.Sharded(mw.Mesh({"batch": 1}))))
    axes, space = (("a", 4),), Space(zero=(0, 2), accumulate=(1,))
    result = search(graph, H100, ROUND, space=replace(space, axes=axes), limit_s=60)
    best = result.candidates[0]
    assert result.is_proven
    assert best.layouts.choices.remat == "selective"
    expected = enumerated(graph, H100, ROUND, space, None, "time", [(4,)])
    assert expected * (1 - 1e-9) <= best.cost.time_s <= 1.02 * expected


def test_one_number_of_an_array_is_no_layer():
    """A key that is split, or ``w[0]`` of a vector, is a slice without dims."""

    def loss(weights, x):
        noise = jax.random.split(jax.random.key(0), 2)
        return jnp.mean((x * weights[0] + jax.random.normal(noise[0], x.shape)) ** 2)

    program = mw.jax_program(loss, jax.ShapeDtypeStruct((4,), "float32"), optax.sgd(0.1))
    plan = mw.plan(program, jax.ShapeDtypeStruct((64, 8), "float32"), target="v5e:2x2")
    assert plan.chosen.time_s


def test_meshes_and_axes_are_chosen_together():
    """All meshes of up to eight devices at once, against enumeration of all of them."""
    graph, hardware = mlp(48, 64, 96), ROUND
    sizes = {()}
    for count in range(1, 4):
        for shape in itertools.product(range(2, 9), repeat=count):
            if math.prod(shape) <= 8:
                sizes.add(shape)
    space = Space(zero=(0, 1), accumulate=(1,), remat=("none",))
    expected = enumerated(graph, H100, hardware, space, None, "time", sorted(sizes))
    result = search(graph, H100, hardware, space=space)
    assert result.candidates[0].cost.time_s <= 1.02 * expected
    assert result.candidates[0].cost.time_s >= expected * (1 - 1e-9)


def test_answers_are_the_same_each_time():
    graph = transformer(32, 512, 1024, 8, 128, 4096, blocks=2)
    first, second = (search(graph, H100, hardware_of(H100), keep=3) for _ in range(2))
    assert first == second
    assert len(first.candidates) == 3


def test_what_holds_most_is_an_alternative_where_it_is_faster():
    """Of the least bytes first: remat that holds less does not hide what takes less time."""
    graph = transformer(32, 512, 1024, 8, 128, 4096, blocks=2)
    space = Space(axes=(("batch", 4),), zero=(0,), accumulate=(1,))
    result = search(graph, H100, hardware_of(H100), objective="memory", space=space, keep=3)
    costs = [candidate.cost for candidate in result.candidates]
    ways = [candidate.layouts.choices.remat for candidate in result.candidates]
    assert ways == ["block", "selective", "none"]
    assert costs == sorted(costs, key=lambda cost: cost.peak_bytes)
    assert costs == sorted(costs, key=lambda cost: cost.time_s, reverse=True)


def test_times_do_not_depend_on_the_process():
    """As sums of floats would, in the order of a set of texts."""
    answers = {
        subprocess.run(
            [sys.executable, "-c", _TIMES],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (0, 1, 5)
    }
    assert len(answers) == 1
    assert all(answers)


_TIMES = """
from small_graphs import transformer

from meshwright.targets.hardware import hardware_of
from meshwright.planning.search.choices import EVERY_REMAT
from meshwright.planning.search.compact import compact
from meshwright.planning.search.frame import frame_of
from meshwright.planning.search.setting import setting_of
from meshwright.targets.target import Target

target = Target.of("h100:8")
problem = compact(transformer(32, 512, 1024, 8, 128, 4096, blocks=2), target.platform)
setting = setting_of((("a", 4), ("b", 2)), target, hardware_of(target))
corners = frame_of(problem, setting, 1).corners
print([each.time_s(1, how).tobytes().hex() for each in corners for how in EVERY_REMAT])
"""


def attention_of_blocks(blocks, width=64, heads=4):
    """The step of a plain function: nothing but their order tells its blocks apart."""

    def loss(weights, x):
        rows, length, _ = x.shape
        for n in range(blocks):
            projected = (x @ weights[f"block_{n}/{name}"] for name in ("query", "key", "value"))
            query, key, value = (y.reshape(rows, length, heads, -1) for y in projected)
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
            mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, value).reshape(rows, length, width)
            x = x + mixed @ weights[f"block_{n}/out"]
        return jnp.mean(x**2)

    names = ("query", "key", "value", "out")
    weights = {
        f"block_{n}/{name}": jax.ShapeDtypeStruct((width, width), "float32")
        for n in range(blocks)
        for name in names
    }
    program = mw.jax_program(loss, weights, optax.sgd(0.1))
    batch = jax.ShapeDtypeStruct((16, 32, width), "float32")
    return graph_of_step(abstract_step(program, batch, mw.Placement.of(mw.Mesh({"batch": 1}))))


def test_equal_blocks_without_names_are_one_kind_of_work():
    three, nine = (compact(attention_of_blocks(blocks)) for blocks in (3, 9))
    assert len(nine.works) == len(three.works)
    assert len(nine.units) == len(three.units)


@pytest.mark.parametrize("zero", [0, 1])
def test_families_of_activations_change_no_cost(zero):
    """Each dim that no argument has as a family of its own, beside those that are found."""
    graph = attention_of_blocks(3)
    problem = compact(graph)
    laid_out = {problem.units[place].family for place in problem.laid_out}
    dims = [d if d.family in laid_out else replace(d, family=d.name) for d in graph.dims]
    alone = replace(graph, dims=tuple(dims))
    assert len(compact(alone).units) > len(problem.units)
    axes, rules = (("rows", 4), ("cols", 2)), {"batch": ["rows"], "block/key.out": ["cols"]}
    one, other = (cost(g, axes, rules, Choices(zero), target=H100) for g in (graph, alone))
    assert one.peak_bytes == other.peak_bytes
    assert one.time_s == pytest.approx(other.time_s, rel=1e-9)


def test_one_device_where_talking_costs_more():
    target = Target.of("v5e:2x4")
    result = search(mlp(), target, hardware_of(target))
    assert result.candidates[0].layouts.rules == ()


def test_the_search_is_quick_for_gpt2():
    """1.5B parameters in 48 blocks; ten seconds are what is promised on two quiet cores."""
    graph = transformer(
        batch=32, length=1024, d_model=1600, heads=25, d_head=64, d_ff=6400, vocab=50304, blocks=48
    )
    begun = time.process_time()
    result = search(graph, H100, hardware_of(H100), limit_bytes=80_000_000_000)
    assert result.is_proven
    assert result.candidates
    assert time.process_time() - begun < 10


# Mesh-TensorFlow's automatic layouts: the tests of its layout optimizer


def product_of_two(a=10, b=5, c=20, times=1):
    builder = Builder()
    for name, size in (("a", a), ("b", b), ("c", c)):
        builder.dim(name, size)
    builder.tensor("x1", "a b", "input")
    builder.tensor("x2", "b c", "input")
    for i in range(times):
        builder.dot("x1 x2", f"y{i}", "a c", "b")
    return builder


def least_memory(graph, axes=None, max_axes=3):
    space = Space(axes, max_axes, False, (0,), (1,), ("none",))
    result = search(graph, H100, hardware_of(H100), objective="memory", space=space)
    return result.candidates[0].layouts


@pytest.mark.parametrize("times", [1, 100])
def test_mesh_tensorflows_layout(times):
    graph = product_of_two(times=times).graph()
    result = least_memory(graph, (("m1", 4), ("m2", 2)))
    assert dict(result.rules) == {"a": ("m2",), "c": ("m1",)}  # its test: "a:m2;c:m1"
    assert len(compact(graph).works) == 1  # as little for a hundred as for one


def test_mesh_tensorflows_layout_and_mesh():
    result = least_memory(product_of_two().graph(), max_axes=2)
    sizes = dict(result.axes)
    assert {family: sizes[axis] for family, (axis,) in result.rules} == {"a": 2, "c": 4}


def test_mesh_tensorflows_dims_that_cannot_be_split():
    builder = product_of_two()
    builder.add("unstack", "x1", "u1", "a b", whole="a")
    builder.add("unstack", "x2", "u2", "b c", whole="c")
    graph = builder.graph()
    assert least_memory(graph, (("m1", 4), ("m2", 2))).of("b") == ()  # 5 does not divide


def test_without_its_defects():
    """It hangs for numbers that are no power of two, and scores layouts that do not divide."""
    graph = product_of_two(a=12, b=5, c=21).graph()
    target = Target.of("h100:6")
    space = Space(None, 2, True, (0,), (1,), ("none",))
    result = search(graph, target, hardware_of(target), objective="memory", space=space)
    assert result.is_proven
    layouts = result.candidates[0].layouts
    sizes = dict(layouts.axes)
    assert {family: sizes[axis] for family, (axis,) in layouts.rules} == {"a": 2, "c": 3}
    with pytest.raises(DivisibilityError):
        cost(graph, (("m1", 5),), {"a": ["m1"]}, target=target)


def test_layouts_read_well():
    layouts = Layouts((("batch", 4),), (("batch", ("batch",)),), Choices(1, 2, "block"))
    assert str(layouts) == "(batch=4): batch over batch; zero=1, accumulate=2, remat"


BESIDE_TENSORFLOW = """
import os, sys, types

from meshwright.planning.search.solve import solver_module

sys.modules["tensorflow"] = types.ModuleType("tensorflow")
before, asked, set_flags = sys.getdlopenflags(), [], sys.setdlopenflags
sys.setdlopenflags = lambda flags: (asked.append(flags), set_flags(flags))
solver_module().CpModel()
assert asked == [before | os.RTLD_DEEPBIND, before], (asked, before)
"""


@pytest.mark.skipif(not hasattr(os, "RTLD_DEEPBIND"), reason="of Linux alone")
def test_the_solver_is_loaded_with_its_own_functions_beside_tensorflow() -> None:
    """With TensorFlow's, of another release of Protocol Buffers, its process ended."""
    subprocess.run([sys.executable, "-c", BESIDE_TENSORFLOW], check=True, timeout=120)
