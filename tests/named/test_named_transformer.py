"""The Transformers are the same function under any rules: that of a plain twin over bare arrays."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_transformer as plain
import pytest

import meshwright as mw
import meshwright.named as mn
from meshwright.errors import DimError, ModelError
from meshwright.named import layers, models
from meshwright.named.moe import Gating, MixtureOfExperts
from meshwright.named.operation import is_named

DIMS = "length:8 vocab:16 d_model:8 d_ff:16 heads:8 d_kv:4 layers:2"
SMALL = DIMS.replace("layers:2", "layers:1")
PAPER = "batch:rows;vocab:cols;d_ff:cols;heads:cols"
RULES = {
    "no rules": ("", {"all": 8}),
    "data-parallel": ("batch:all", {"all": 8}),
    "model-parallel": ("vocab:all;d_ff:all;heads:all", {"all": 8}),
    "2-D, of the paper": (PAPER, {"rows": 4, "cols": 2}),
    "3-D": (f"{PAPER};d_model:planes", {"rows": 2, "cols": 2, "planes": 2}),
    "split positions": ("length:rows;vocab:cols;d_ff:cols;heads:cols", {"rows": 4, "cols": 2}),
}
TOLERANCE = 2e-6  # of losses near 3; the largest difference that was measured is 9.5e-7
GATHER = re.compile(r"= (\S+) all-gather(?:-start)?\(|= (\S+) all-to-all\(")


def ids(*shape: int, low: int = 0) -> Any:
    return np.random.default_rng(sum(shape)).integers(low, 16, shape)


def rules_of(name: str) -> Any:
    rules, mesh = RULES[name]
    return mn.rules(rules, mw.create_mesh(mesh))


def laid(tree: Any) -> Any:
    """The arrays of a tree where the rules in force put them."""
    return jax.tree.map(lambda x: mn.named(x.array, x.dims), tree, is_leaf=is_named)


def descent(loss: Callable[..., Any]) -> Callable[..., Any]:
    """One step of plain gradient descent, on named or bare parameters."""

    def step(params: Any, *batch: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients, is_leaf=is_named), value

    return step


def losses(step: Callable[..., Any], params: Any, *batch: Any) -> list[float]:
    results = []
    for _ in range(5):
        params, loss = step(params, *batch)
        results.append(float(loss))
    return results


def of_plain(loss: Callable[..., Any], params: Any, *batch: Any) -> list[float]:
    return losses(jax.jit(descent(loss)), plain.bare(params), *batch)


# The language model.

MODEL = models.Transformer(SMALL, z_loss=1e-2)


@pytest.fixture(scope="module")
def params() -> Any:
    return plain.parameters(MODEL)


@pytest.fixture(scope="module")
def expected(params: Any) -> list[float]:
    return of_plain(plain_loss, params, TOKENS)


TOKENS = ids(8, 8)


def plain_loss(params: Any, tokens: Any, z_loss: float = 1e-2) -> Any:
    logits = plain.transformer(params, plain.before(tokens))
    return plain.cross_entropy(logits, tokens, jnp.ones(tokens.shape), z_loss)


@pytest.mark.full
@pytest.mark.parametrize("rules", RULES)
def test_losses_over_five_steps_are_those_of_the_plain_twin(
    rules: str, params: Any, expected: list[float]
) -> None:
    with rules_of(rules):
        named = laid(params), mn.named(TOKENS, "batch:8 length:8")
        step = jax.jit(descent(MODEL.loss)).lower(*named).compile()
        np.testing.assert_allclose(losses(step, *named), expected, rtol=0, atol=TOLERANCE)
    gathered = [one or other for one, other in GATHER.findall(step.as_text())]
    if rules == "split positions":  # keys and values of every position, for those of each device
        keys = {"f32[8,8,4,4]{3,2,0,1}"}
        assert {shape for shape in gathered if shape.count(",") > 3} == keys
    else:
        assert not gathered  # no table, no logits, no weight


@pytest.mark.full
def test_an_encoder_decoder_is_the_plain_twin_under_the_rules_of_the_paper() -> None:
    model = models.EncoderDecoder(SMALL, shared_embedding=False)
    params = plain.parameters(model)
    source, target = ids(8, 6), ids(8, 8)
    source[:, 4:] *= ids(8, 2) % 2  # some padding, of token 0

    def plain_loss(params: Any, source: Any, target: Any) -> Any:
        logits = plain.encoder_decoder(params, source, plain.before(target))
        return plain.cross_entropy(logits, target, target != 0)

    expected = of_plain(plain_loss, params, source, target)
    with rules_of("2-D, of the paper"):
        batch = mn.named(source, "batch:8 length:6"), mn.named(target, "batch:8 length:8")
        params = laid(params)
        step = jax.jit(descent(model.loss)).lower(params, *batch).compile()
        np.testing.assert_allclose(losses(step, params, *batch), expected, rtol=0, atol=TOLERANCE)
    assert not GATHER.findall(step.as_text())


# Choices, each beside the model without it.

ONE = models.Transformer(SMALL)


def test_later_tokens_do_not_change_earlier_logits(params: Any) -> None:
    tokens = ids(2, 8)
    changed = tokens.copy()
    changed[:, 5:] += 1
    logits = jax.jit(ONE)
    first, second = (
        np.asarray(logits(params, mn.named(x % 16, "batch:2 length:8"))) for x in (tokens, changed)
    )
    np.testing.assert_array_equal(first[:, :5], second[:, :5])
    assert (first[:, 5:] != second[:, 5:]).any(-1).all()


ATTENTIONS = {
    "whole": None,
    "local": layers.Attention("d_model:8", "heads:8", "d_kv:4", causal=True, radius=3),
    "multi-query": layers.Attention(
        "d_model:8", "heads:8", "d_kv:4", causal=True, multi_query=True
    ),
}


@pytest.mark.full_for("whole-True")
@pytest.mark.parametrize(
    ("attention", "scan"),
    [("whole", True), ("local", False), pytest.param("multi-query", False, marks=pytest.mark.full)],
)
def test_step_by_step_logits_are_those_of_all_positions_at_once(attention: str, scan: bool) -> None:
    dims = DIMS if scan else SMALL
    model = models.Transformer(dims, attention=ATTENTIONS[attention], scan=scan)
    params = plain.parameters(model)
    tokens = ids(2, 8)

    @jax.jit
    def both(params: Any, tokens: Any) -> Any:
        step, states = model.stepper(params, "batch:2", 8)

        def body(states: Any, turn: Any) -> Any:
            at, token = turn
            logits, states = step(mn.named(token, "batch:2"), at, states)
            return states, logits.array

        _, steps = jax.lax.scan(body, states, (jnp.arange(8), tokens.T))
        return steps.swapaxes(0, 1), model(params, mn.named(tokens, "batch:2 length:8")).array

    np.testing.assert_allclose(*both(params, tokens), rtol=1e-5, atol=2e-6)


def stacked(params: Any) -> Any:
    """Parameters of layers that are written out, as those of a loop over them."""
    dim = mn.Dim("layers", len(params["stack"]))
    blocks = jax.tree.map(
        lambda *copies: mn.NamedArray(jnp.stack([x.array for x in copies]), (dim, *copies[0].dims)),
        *params["stack"].values(),
        is_leaf=is_named,
    )
    return params | {"stack": blocks}


@pytest.fixture(scope="module")
def two() -> Any:
    """Parameters of two layers: written out, and of a loop."""
    params = plain.parameters(models.Transformer(DIMS))
    return params, stacked(params)


@pytest.mark.full
def test_a_loop_over_layers_begins_as_layers_that_are_written_out() -> None:
    one, other = (
        jax.jit(models.Transformer(DIMS, scan=scan).init)(jax.random.key(0))
        for scan in (False, True)
    )
    assert jax.tree.structure(stacked(one)) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, stacked(one), other)


@pytest.mark.full_for("False")
@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.full)])
def test_scan_and_remat_change_neither_loss_nor_gradient(remat: bool, two: Any) -> None:
    model = models.Transformer(DIMS, scan=True, remat=remat)
    tokens = mn.named(TOKENS, "batch:8 length:8")
    loss, gradients = jax.jit(jax.value_and_grad(models.Transformer(DIMS).loss))(two[0], tokens)
    with rules_of("2-D, of the paper"):
        result, of_loop = jax.jit(jax.value_and_grad(model.loss))(laid(two[1]), tokens)
    np.testing.assert_allclose(result, loss, rtol=0, atol=TOLERANCE)
    expected = stacked(gradients)
    assert jax.tree.structure(of_loop) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(of_loop), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_remat_computes_blocks_again(params: Any) -> None:
    tokens = mn.named(TOKENS, "batch:8 length:8")
    choices = [False, True, "dots_saveable"]
    plainly, anew, partly = (
        jax.jit(jax.grad(model.loss)).lower(params, tokens).as_text().count("dot_general")
        for model in (models.Transformer(SMALL, remat=choice) for choice in choices)
    )
    # Of six products in a block, the gradient needs the results of all but the last.
    assert (anew, partly) == (plainly + 5, plainly)


@pytest.mark.full
def test_activations_are_of_the_dtype_and_losses_of_float32(params: Any) -> None:
    model = models.Transformer(SMALL, dtype=jnp.bfloat16)
    tokens = mn.named(TOKENS, "batch:8 length:8")
    assert jax.eval_shape(model, params, tokens).dtype == jnp.bfloat16
    loss, gradients = jax.jit(jax.value_and_grad(model.loss))(params, tokens)
    assert loss.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, jax.jit(ONE.loss)(params, tokens), rtol=0.02)


@pytest.mark.full
def test_dropout_draws_the_same_under_any_rules(params: Any) -> None:
    model = models.Transformer(SMALL, dropout=0.5)
    tokens = mn.named(TOKENS, "batch:8 length:8")

    def losses(params: Any) -> Any:
        key = jax.random.key(3)
        quiet = model.loss(params, tokens, key=key, training=False)
        return model.loss(params, tokens, key=key), quiet

    expected, quiet = jax.jit(losses)(params)
    assert abs(expected - quiet) > 1e-3  # in evaluation nothing is left out
    with rules_of("2-D, of the paper"):
        actual = jax.jit(losses)(laid(params))
    np.testing.assert_allclose(actual, (expected, quiet), rtol=0, atol=TOLERANCE)


def test_weights_leave_tokens_out_of_the_loss(params: Any) -> None:
    tokens = ids(2, 8)
    weights = mn.named((np.arange(8) < 6).astype("float32"), "length:8")
    loss = jax.jit(ONE.loss)
    actual = loss(params, mn.named(tokens, "batch:2 length:8"), weights=weights)
    expected = loss(params, mn.named(tokens[:, :6], "batch:2 length:6"))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


class WithLoss(layers.FeedForward):
    """A feed-forward layer with a loss of its own, as a mixture of experts has."""

    def __call__(self, params: Any, x: mn.NamedArray, **how: Any) -> Any:
        output = super().__call__(params, x, **how)
        return output, mn.reduce_mean(mn.square(output))


@pytest.mark.full_for("False")
@pytest.mark.parametrize("scan", [False, True])
def test_losses_of_layers_are_added_to_the_loss(scan: bool, two: Any) -> None:
    tokens, params = mn.named(ids(2, 8), "batch:2 length:8"), two[scan]
    model = models.Transformer(DIMS, feed_forward=WithLoss("d_model:8", "d_ff:16"), scan=scan)
    alone = models.Transformer(DIMS, scan=scan)

    @jax.jit
    def all_losses(params: Any) -> Any:
        x = model.tokens(params["tokens"], mn.named(plain.before(tokens.array), tokens.dims))
        _, extra = model.stack(params["stack"], x)
        return model.loss(params, tokens), alone.loss(params, tokens), extra.array

    total, without, extra = all_losses(params)
    assert extra > 0.01
    np.testing.assert_allclose(total, without + extra, rtol=1e-5)


def test_a_mixture_of_experts_is_a_feed_forward_layer() -> None:
    experts = MixtureOfExperts("d_model:8", "d_ff:16", Gating("experts:4"))
    model = models.Transformer(SMALL, feed_forward=experts, scan=True)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = mn.named(TOKENS, "batch:8 length:8")
    with mn.rules(f"{PAPER};experts:rows", mw.create_mesh({"rows": 4, "cols": 2})):
        loss = functools.partial(model.loss, key=jax.random.key(0))
        result = jax.eval_shape(jax.grad(loss), params, tokens)
        assert jax.tree.structure(result) == jax.tree.structure(params)
        assert jax.eval_shape(lambda p: model.greedy(p, tokens, 8), params).shape == tokens.shape


EXPERTS = MixtureOfExperts(
    "d_model:8", "d_ff:16", Gating("experts:4", "switch", min_capacity=1, capacity_factor=0.5)
)


def test_a_loss_that_differs_in_training_asks_which_is_meant() -> None:
    model = models.Transformer(SMALL, feed_forward=(None, EXPERTS))
    quiet = models.Transformer(SMALL, dropout=0.1)
    translator = models.EncoderDecoder(SMALL, attention=layers.Attention("d_model:8", "heads:8",
                                       "d_kv:4", dropout=0.2), feed_forward=EXPERTS)  # fmt: skip
    tokens = mn.named(ids(2, 8), "batch:2 length:8")
    for some, says in [(model, "MixtureOfExperts"), (quiet, "dropout=0.1"),
                       (translator, "dropout=0.2, MixtureOfExperts")]:  # fmt: skip
        batch = (tokens,) if some is not translator else (tokens, tokens)
        params = jax.eval_shape(some.init, jax.random.key(0))
        with pytest.raises(ModelError, match=rf"differs .*\({says}\).*training=False to evaluate"):
            jax.eval_shape(some.loss, params, *batch)
        for how in ({"training": False}, {"key": jax.random.key(0)}):
            jax.eval_shape(functools.partial(some.loss, **how), params, *batch)
    with pytest.raises(ModelError, match=r"dropout=0.1 draws .*: give key="):
        quiet.loss(quiet.init(jax.random.key(0)), tokens, training=True)


def test_training_uses_the_capacity_of_training() -> None:
    model = models.Transformer(SMALL, feed_forward=EXPERTS)
    params = plain.parameters(model)
    tokens = mn.named(ids(2, 8), "batch:2 length:8")
    how = ({"training": True}, {"key": jax.random.key(0)}, {"training": False})
    trained, keyed, evaluated = (
        float(jax.jit(functools.partial(model.loss, **options))(params, tokens)) for options in how
    )
    assert trained == keyed != evaluated


def test_a_token_before_the_first_may_be_any(params: Any) -> None:
    model = models.Transformer(SMALL, start=7)
    tokens = ids(2, 8)
    inputs = np.concatenate([np.full([2, 1], 7), tokens[:, :-1]], 1)
    logits = jax.jit(plain.transformer)(plain.bare(params), inputs)
    expected = plain.cross_entropy(logits, tokens, jnp.ones(tokens.shape))
    actual = jax.jit(model.loss)(params, mn.named(tokens, "batch:2 length:8"))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.full
def test_parameters_are_the_same_under_any_rules_which_may_be_given() -> None:
    params = jax.jit(ONE.init)(jax.random.key(0))
    with rules_of("2-D, of the paper") as rules:
        anew = jax.jit(ONE.init)(jax.random.key(0))
    actual, expected = (jax.tree.leaves(x, is_leaf=is_named) for x in (anew, params))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x.array, y.array)
        sharding = rules.layout(x.dims).sharding
        assert x.array.sharding.is_equivalent_to(sharding, x.array.ndim)
    tokens = mn.named(TOKENS, "batch:8 length:8")
    loss = jax.jit(lambda params, tokens: ONE.loss(params, tokens, rules=rules))  # type: ignore
    expected = jax.jit(plain_loss)(plain.bare(params), TOKENS, 0.0)
    np.testing.assert_allclose(loss(anew, tokens), expected, rtol=0, atol=TOLERANCE)


# What does not fit.


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: models.Transformer("length:8 vocab:16 heads:2 d_kv:4 layers:2").tokens,
         r"Transformer lacks 'd_model', 'd_ff' in \[length:8 vocab:16 heads:2 d_kv:4 layers:2\]: "
         "its dims are 'length', 'vocab'"),
        (lambda: models.EncoderDecoder(f"{SMALL} experts:4").tokens, "has no use for 'experts'"),
        (lambda: ONE(ONE.init(jax.random.key(0)), mn.named(ids(1, 9), "batch:1 length:9")),
         "9 tokens are more than the model's 8 positions: give it 'length:9', or take fewer"),
        (lambda: ONE(ONE.init(jax.random.key(0)), mn.named(ids(1, 9), "batch:1 time:9")),
         r"there is no dim 'length' in \[batch:1 time:9\]"),
        (lambda: ONE.stack.keep({}, mn.named(1.0, "")), "blocks without cross= look at no memory"),
        (lambda: ONE.stack(ONE.init(jax.random.key(0))["stack"], mn.named(jnp.ones([1, 8]),
         "length:1 d_model:8"), memory={"layer_0": {"key": 1}}),
         "a block with cross= takes memory=, .* received cross=None and memory=.'key'."),
        (lambda: ONE.greedy({}, mn.named(ids(1, 9), "batch:1 length:9"), 9),
         "9 tokens are more than the model's 8 positions"),
        (lambda: ONE.greedy({}, ids(1, 4), 8),  # type: ignore[arg-type]
         r"an array of shape \(1, 4\) has no names for its dims"),
        (lambda: ONE.init(0), r"key must be one random key, as jax\.random\.key\(0\).*received 0"),
        (lambda: models.Transformer(SMALL, positions="rope"),  # type: ignore[arg-type]
         "positions must be one of 'learned', .*'none', or a RelativeBias; received 'rope'"),
        (lambda: models.EncoderDecoder(SMALL, positions=None),  # type: ignore[arg-type]
         "received None"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(wrong: Callable[[], Any], says: str) -> None:
    with pytest.raises((DimError, ModelError), match=says):
        jax.eval_shape(wrong)
