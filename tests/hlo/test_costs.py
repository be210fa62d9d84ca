"""FLOPs and bytes of compiled steps: a Transformer's against the formula, the rest by hand."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.hlo.arithmetic import _places
from meshwright.hlo.costs import Loop, read_costs
from meshwright.jaxprs.flops import model_flops
from meshwright.planning import compile_ahead

BLOCKS, WIDTH, HIDDEN, HEADS, VOCAB, LENGTH, ROWS = 2, 64, 128, 8, 96, 32, 16
LAYOUTS = {
    "data": ({"data": 8}, None),
    "model": ({"data": 1, "model": 8}, "model"),
    "both": ({"data": 2, "model": 4}, "model"),
}


def block(weights, x):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, weights[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    x += jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", scores, v), weights["mix"])
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def step(weights, ids, remat, scanned):
    one = jax.checkpoint(block) if remat else block

    def loss(weights):
        x = weights["embed"][ids]
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (one(w, x), None), x, weights["blocks"])
        else:
            for i in range(BLOCKS):
                with jax.named_scope(f"block_{i}"):
                    x = one(jax.tree.map(lambda w, i=i: w[i], weights["blocks"]), x)
        with jax.named_scope("head"):
            logits = jax.nn.log_softmax(x @ weights["head"])
        return -jnp.mean(jnp.take_along_axis(logits, ids[..., None], -1))

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def formula(remat):
    """6·N·tokens and the attention's products, three times two for each of its two; computed
    again is all of a block but its last product, whose result is not needed again."""
    tokens = ROWS * LENGTH
    in_block = 4 * WIDTH**2 + 2 * WIDTH * HIDDEN
    attention = 2 * 2 * LENGTH * WIDTH  # per token, forward
    whole = 6 * (BLOCKS * in_block + WIDTH * VOCAB) + 3 * BLOCKS * attention
    again = BLOCKS * (2 * (in_block - WIDTH * HIDDEN) + attention) if remat else 0
    return tokens * whole, tokens * again


def arguments(layout):
    axes, model = LAYOUTS[layout]
    mesh = mw.Mesh(axes)
    wide = [None, None, model, None]
    specs = {
        **dict.fromkeys("qkv", ((BLOCKS, WIDTH, HEADS, WIDTH // HEADS), wide)),
        "mix": ((BLOCKS, HEADS, WIDTH // HEADS, WIDTH), [None, model, None, None]),
        "up": ((BLOCKS, WIDTH, HIDDEN), [None, None, model]),
        "down": ((BLOCKS, HIDDEN, WIDTH), [None, model, None]),
    }
    weights = {
        "embed": shaped(mesh, (VOCAB, WIDTH), [model, None]),
        "head": shaped(mesh, (WIDTH, VOCAB), [None, model]),
        "blocks": {name: shaped(mesh, *lies) for name, lies in specs.items()},
    }
    return weights, shaped(mesh, (ROWS, LENGTH), ["data", None], jnp.int32)


def shaped(mesh, dims, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=mw.Layout(spec, mesh).sharding)


@functools.cache
def costs_of(layout, remat=False, scanned=False, target="cpu:8"):
    args = arguments(layout)
    lies = jax.tree.map(lambda array: array.sharding, args[0])
    traced = functools.partial(step, remat=remat, scanned=scanned)
    jitted = jax.jit(traced, donate_argnums=0, out_shardings=(lies, None))
    compiled = compile_ahead(jitted, args, target)
    return read_costs(compiled.text, compiled.axes)


CASES = [
    ("data", False, False),
    ("model", False, True),
    ("both", True, False),
    ("both", True, True),
]


@pytest.mark.full
@pytest.mark.parametrize(("layout", "remat", "scanned"), CASES)
def test_the_flops_of_a_transformer_are_those_of_the_formula(layout, remat, scanned):
    costs = costs_of(layout, remat, scanned)
    whole, again = formula(remat)
    assert 8 * costs.flops == pytest.approx(whole + again, rel=0.02)
    assert 8 * costs.recompute_flops <= again * 1.02
    assert not costs.unknown_loops
    assert not costs.uncounted


@pytest.mark.targets
@pytest.mark.parametrize(("layout", "remat", "scanned"), CASES)
def test_so_they_are_where_products_are_convolutions(layout, remat, scanned):
    pytest.importorskip("libtpu", reason="pip install 'meshwright[tpu]'")
    whole, again = formula(remat)
    costs = costs_of(layout, remat, scanned, "v5p:2x2x2")
    assert 8 * costs.flops == pytest.approx(whole + again, rel=0.02)
    assert not costs.unknown_loops


@pytest.mark.full
def test_layers_are_told_apart_and_backward_is_twice_forward():
    costs = costs_of("data", False, False)
    layers = {layer.layer: layer for layer in costs.layers}
    for name in ("block_0", "block_1", "head"):
        assert layers[name].backward_flops == 2 * layers[name].forward_flops > 0
    assert layers["block_0"].flops == layers["block_1"].flops
    assert sum(layer.flops for layer in costs.layers) == costs.flops
    assert sum(layer.bytes for layer in costs.layers) == costs.bytes


@pytest.mark.full
def test_what_is_computed_again_is_told_apart():
    costs = costs_of("both", True, True)
    assert 0 < 8 * costs.recompute_flops <= formula(True)[1]
    assert costs_of("data", False, False).recompute_flops == 0


@pytest.mark.full
def test_a_loop_is_multiplied_out():
    loops = [part for part in costs_of("model", False, True).program if isinstance(part, Loop)]
    loop = next(loop for loop in loops if any(one.flops for one in loop.body))
    assert loop.trips == BLOCKS
    assert {part.count for part in loop.body} == {BLOCKS}


def test_a_loop_that_ends_by_a_condition_is_reported_and_counts_once():
    def until(x):
        return jax.lax.while_loop(lambda x: x.sum() < 100.0, lambda x: x @ x, x)

    costs = read_costs(jax.jit(until).lower(jnp.ones((8, 8))).compile().as_text())
    assert len(costs.unknown_loops) == 1
    assert costs.flops == 2 * 8**3


def test_of_branches_the_heaviest_counts():
    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    costs = read_costs(jax.jit(either).lower(jnp.ones((8, 8))).compile().as_text())
    assert costs.flops == 2 * 2 * 8**3


@pytest.mark.full_for("spec0-0.75")
@pytest.mark.parametrize(
    ("spec", "share"), [(["data", None], 0.75), ([("data", "model"), None], 0)]
)
def test_the_share_of_work_that_is_done_more_than_once(spec, share):
    mesh = mw.Mesh({"data": 2, "model": 4})
    args = shaped(mesh, (64, 32), spec), shaped(mesh, (32, 16), [None, None])
    product = jax.jit(lambda x, w: x @ w)
    compiled = compile_ahead(product, args, "cpu:8")
    whole = model_flops(jax.make_jaxpr(product)(*args))
    assert whole is not None
    assert read_costs(compiled.text).replicated_share(whole, 8) == share


# Convolutions


def test_places_of_a_window_are_those_counted_one_by_one():
    ranges = [1, 2, 5, 8], [1, 2, 3], [1, 4], [1, 2, 7], [0, 1, 3, 7], [1, 2, 3, 8], [1, 2]
    for size, window, out, stride, padding, spread, gaps in itertools.product(*ranges):
        lies = [o * stride + k * gaps - padding for o in range(out) for k in range(window)]
        on = [at for at in lies if 0 <= at <= (size - 1) * spread and at % spread == 0]
        assert _places(size, window, out, stride, padding, spread, gaps) == len(on)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_and_its_gradients(stride):
    def convolve(x, filters):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, filters, (stride, stride), "VALID", dimension_numbers=dims
        )

    shapes = jnp.ones((2, 9, 9, 4)), jnp.ones((3, 3, 4, 12))
    out = (9 - 3) // stride + 1
    forward = 2 * 2 * out**2 * 12 * 3 * 3 * 4

    def flops(function):
        return read_costs(jax.jit(function).lower(*shapes).compile().as_text()).flops

    def loss(x, filters):
        return jnp.sum(convolve(x, filters) ** 2)

    assert flops(convolve) == forward
    assert flops(jax.grad(loss, argnums=(0, 1))) == pytest.approx(3 * forward)


# Bytes, in text that a compiler could have written


def program(body, fused="", head="HloModule m, is_scheduled=true"):
    return f"{head}\n{fused}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def moved(body, fused=""):
    return {operation.name: operation for operation in read_costs(program(body, fused)).operations}


def test_views_cost_nothing_and_copies_both_ways():
    result = moved(
        """  %p = f32[8]{0} parameter(0)
  %view = f32[2,4]{1,0} bitcast(%p)
  ROOT %copied = f32[2,4]{0,1} copy(%view)"""
    )
    assert list(result) == ["copied"]
    assert (result["copied"].bytes_read, result["copied"].bytes_written) == (32, 32)


def test_of_what_is_cut_or_changed_in_place_only_that_part_counts():
    fused = """%cut (a: f32[64,8], i: s32[]) -> f32[1,8] {
  %a = f32[64,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[1,8]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,8}
}

%put (a: f32[64,8], b: f32[1,8], i: s32[]) -> f32[64,8] {
  %a.1 = f32[64,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %new = f32[64,8]{1,0} dynamic-update-slice(%a.1, %b, %i.1, %zero.1)
}

%within (c: f32[64,8], j: s32[]) -> f32[1,8] {
  %c = f32[64,8]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %own = f32[1,8]{1,0} fusion(%c, %j), kind=kLoop, calls=%cut
  ROOT %double = f32[1,8]{1,0} add(%own, %own)
}

%changed (d: f32[64,8], e: f32[1,8], k: s32[]) -> f32[64,8] {
  %d = f32[64,8]{1,0} parameter(0)
  %e = f32[1,8]{1,0} parameter(1)
  %k = s32[] parameter(2)
  ROOT %inner = f32[64,8]{1,0} fusion(%d, %e, %k), kind=kLoop, calls=%put
}
"""
    result = moved(
        """  %p = f32[64,8]{1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  %row = f32[1,8]{1,0} fusion(%p, %i.2), kind=kLoop, calls=%cut
  %all = f32[64,8]{1,0} fusion(%p, %row, %i.2), kind=kLoop, calls=%put
  %begun = ((f32[64,8]{1,0}, f32[1,8]{1,0}, s32[]), f32[64,8]{1,0}, u32[]) fusion-start(%all, %row, %i.2), kind=kLoop, calls=%put
  %again = f32[64,8]{1,0} fusion-done(%begun)
  %twice = f32[1,8]{1,0} fusion(%again, %i.2), kind=kOutput, calls=%within
  ROOT %last = f32[64,8]{1,0} fusion(%again, %twice, %i.2), kind=kLoop, calls=%changed""",  # noqa: E501
        fused,
    )
    assert (result["row"].bytes_read, result["row"].bytes_written) == (32 + 4, 32)
    assert (result["all"].bytes_read, result["all"].bytes_written) == (32 + 4, 32)
    assert (result["begun"].bytes_read, result["begun"].bytes_written) == (32 + 4, 32)
    # TPUs have fusions within fusions.
    assert (result["twice"].bytes_read, result["twice"].bytes_written) == (32 + 4, 32)
    assert (result["last"].bytes_read, result["last"].bytes_written) == (32 + 4, 32)


def test_the_on_chip_memory_of_a_tpu_is_free():
    result = moved(
        """  %p = f32[8]{0:T(128)} parameter(0)
  %begun = (f32[8]{0:T(128)S(1)}, f32[8]{0:T(128)}, u32[]{:S(2)}) copy-start(%p)
  %here = f32[8]{0:T(128)S(1)} copy-done(%begun)
  %half = ((f32[8]{0:T(128)}), f32[4]{0:T(128)S(1)}, s32[]{:S(2)}) slice-start(%p), slice={[0:4]}
  %cut = f32[4]{0:T(128)S(1)} slice-done(%half)
  %sum = f32[8]{0:T(128)S(1)} add(%here, %here)
  ROOT %out = f32[8]{0:T(128)} negate(%sum)"""
    )
    assert (result["begun"].bytes_read, result["begun"].bytes_written) == (32, 0)
    assert (result["half"].bytes_read, result["half"].bytes_written) == (16, 0)
    assert result["here"].ends == "begun"
    assert result["sum"].bytes == 0
    assert (result["out"].bytes_read, result["out"].bytes_written) == (0, 32)


def test_kernels_written_by_hand_tell_their_flops_or_are_reported():
    text = """  %p = f32[8]{0} parameter(0)
  %known = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", KNOWN
  ROOT %unknown = f32[8]{0} custom-call(%known), custom_call_target="mine"
"""
    note = 'backend_config={"custom_call_config":{"cost_estimate":{"flops":"640"}}}'
    costs = read_costs(program(text.replace("KNOWN", note)))
    assert costs.flops == 640
    assert costs.uncounted == ("mine",)


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        read_costs("nothing")
