"""Mixture of experts equals a loop over tokens with queues, under every kind of rules."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_oracle import (
    DIMS,
    EQUAL,
    KEY,
    LAYOUTS,
    Laid,
    Loop,
    jitted,
    layer_of,
    named,
    numbers,
    numpy,
    of,
    same,
    under,
)
from named_laws import Case, check

import meshwright as mw
import meshwright.named as mn
from meshwright.named.gating import Gating
from meshwright.named.models import Transformer


def case(name: str, gating: Gating, dispatch: str, group: int = 8, **how: Any) -> Laid:
    named, expected = of(layer_of(gating, dispatch), **how), numpy(gating, group, **how)
    return Laid(name, named, expected, DIMS, (), slopes=(0, 1, 2, 3), tolerance=1e-4)


TOP_2, SWITCH = EQUAL, replace(EQUAL, choose="switch")
HALVES, PAIRS = replace(TOP_2, group_size=4), replace(TOP_2, group_size=16)
RARELY = replace(TOP_2, second_policy_eval="threshold", second_threshold=0.3)
CASES = [
    case("top_2 by einsum", TOP_2, "einsum"),
    case("top_2 by gather", TOP_2, "gather"),
    case("switch", SWITCH, "einsum"),
    case("half a sequence", HALVES, "gather", 4),
    case("two sequences", PAIRS, "einsum", 16),
    case("in evaluation", RARELY, "einsum", training=False),
]
QUICK = {
    "top_2 by einsum": ("none", "one axis", "3-D"),
    "top_2 by gather": ("two axes", "inside groups"),
    "switch": ("one axis",),
    "half a sequence": ("none",),
    "two sequences": ("one axis and d_ff",),
    "in evaluation": ("none",),
}


def divides(law: Laid, kind: str) -> bool:
    """Whether the groups of a law can be split as these rules want."""
    uneven = {"two sequences": ("batch", "one axis"), "half a sequence": ("inside groups",)}
    return kind not in uneven.get(law.name, ())


def table() -> Iterator[Any]:
    for law in CASES:
        for kind in filter(functools.partial(divides, law), LAYOUTS):
            marks = () if kind in QUICK[law.name] else pytest.mark.full
            yield pytest.param(law, kind, marks=marks, id=f"{law}-{kind}")


@pytest.mark.full_for(
    "half a sequence-none",
    "switch-one axis",
    "top_2 by einsum-3-D",
    "top_2 by einsum-none",
    "top_2 by einsum-one axis",
    "top_2 by gather-inside groups",
    "top_2 by gather-two axes",
    "two sequences-one axis and d_ff",
)
@pytest.mark.parametrize(("law", "kind"), list(table()))
def test_laws(law: Laid, kind: str) -> None:
    if kind == "inside groups":
        law = replace(law, gathers="each piece of a group asks all experts")
    check(law, kind)


class TestHierarchy:
    """Two levels of experts, each along an axis of its own."""

    DIMS = (
        "outer:2 batch:4 length:8 d_model:8", "d_model:8 sets_gate:4",
        "sets:4 d_model:8 experts_gate:2", "sets:4 experts:2 d_model:8 d_ff:8",
        "sets:4 experts:2 d_ff:8 d_model:8",
    )  # fmt: skip
    LEVELS = (
        Gating("sets:4", group_size=8, second_policy="all", balance_loss=1.0),
        Gating("experts:2", group_size=4, capacity_factor=0.5, min_capacity=1, z_loss=0.5,
               second_policy="all"),
    )  # fmt: skip
    RULES = "batch:rows;sets:rows;outer:cols;experts:cols"

    @pytest.mark.full_for("einsum-batch:rows;sets:rows;outer:cols;experts:cols")
    @pytest.mark.parametrize(
        ("dispatch", "rules"),
        [
            ("einsum", RULES),
            pytest.param("gather", RULES, marks=pytest.mark.full),
            pytest.param("einsum", "", marks=pytest.mark.full),
            pytest.param("gather", "", marks=pytest.mark.full),
        ],
    )
    def test_is_the_loop_within_a_loop(self, dispatch: str, rules: str) -> None:
        class OfTwo(Case):
            def rules(self, kind: str) -> Any:
                return mn.BoundRules(mn.DimRules(rules), mw.create_mesh({"rows": 4, "cols": 2}))

        def call(x: Any, router: Any, router_2: Any, up: Any, down: Any) -> Any:
            params = {"router": router, "router_2": router_2, "up": up, "down": down}
            return layer_of(self.LEVELS, dispatch)(params, x, training=True)

        def loop(x: Any, router: Any, router_2: Any, up: Any, down: Any) -> Any:
            result = Loop(self.LEVELS)(x.reshape(8, 8, 8), [router, router_2], up, down)
            out, loss, lost = result
            assert lost.max() > 1  # of two choices, each with two of its own
            return out.reshape(x.shape), loss, lost.reshape(x.shape[:-1])

        law = OfTwo("two levels", call, loop, self.DIMS, (), slopes=range(5), tolerance=1e-4)
        check(law, "both")

    def test_parameters(self) -> None:
        params = layer_of(self.LEVELS).init(jax.random.key(0))
        names = ("router", "router_2", "up", "down")
        assert [params[name].dims for name in names] == [mn.as_dims(d) for d in self.DIMS[1:]]


class TestCommunication:
    """Read from the compiled program."""

    PARTS = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")

    def collectives(self, kind: str, dispatch: str, back: bool) -> dict[str, list[int]]:
        """Elements of every collective's result, per device."""
        with under(kind):
            operands = named(numbers(*DIMS))
            call = forward = of(layer_of(TOP_2, dispatch))
            if back:

                def loss(*operands: Any) -> Any:
                    output, loss, _ = forward(*operands)
                    return (mn.reduce_sum(mn.square(output)) + loss).array

                call = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
            text = jax.jit(call).lower(*operands).compile().as_text()
        matches = re.findall(rf"^[^=]*= (.+?) ({'|'.join(self.PARTS)})(?:-start)?\(", text, re.M)
        return {
            part: [elements(result) for result, name in matches if name == part]
            for part in self.PARTS
        }

    @pytest.mark.parametrize("dispatch", ["einsum", "gather"])
    def test_along_one_axis_tokens_go_all_to_all_and_nothing_else_does(self, dispatch: str) -> None:
        there_and_back = 8 * 8 * 1 * 8 // 8  # experts, groups, places, d_model; of 8 devices
        result = self.collectives("one axis", dispatch, back=False)
        assert result.pop("all-to-all") == [there_and_back] * 2
        assert sum(result.pop("all-reduce")) <= 2  # the losses
        assert not any(result.values()), result

    @pytest.mark.full_for("gather")
    @pytest.mark.parametrize("dispatch", ["einsum", "gather"])
    def test_and_their_gradients_go_the_same_way(self, dispatch: str) -> None:
        result = self.collectives("one axis", dispatch, back=True)
        assert result.pop("all-to-all") == [8 * 8] * 4
        assert sum(result.pop("all-reduce")) <= 8 * 8 + 3  # the router's gradient, and losses
        assert not any(result.values()), result

    @pytest.mark.parametrize("dispatch", ["einsum", "gather"])
    def test_along_two_axes_answers_are_summed(self, dispatch: str) -> None:
        result = self.collectives("two axes", dispatch, back=False)
        answers = 8 * 8 * 8 // 4  # batch, length, d_model; of 4 rows
        assert answers <= sum(result.pop("all-reduce")) <= (answers + 3) * 2
        assert not any(result.values()), result


def elements(result: str) -> int:
    """The number of elements of an array, or of several, as HLO writes them."""
    shapes = re.findall(r"\w+\[([\d,]*)\]", result)
    return sum(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)


class TestEdges:
    @pytest.mark.parametrize("dispatch", ["einsum", "gather"])
    @pytest.mark.parametrize("places", [0, 2])
    def test_few_places(self, places: int, dispatch: Any) -> None:
        gating = replace(TOP_2, capacity_factor=0, min_capacity=places)
        operands = numbers(*DIMS)
        result = jitted(layer_of(gating, dispatch))(*named(operands))
        same(result, numpy(gating)(*operands))
        if places == 0:
            assert not np.any(result.output)
            assert np.all(np.asarray(result.dropped) == 2)

    def test_no_place_is_no_gradient_either(self) -> None:
        gating = replace(TOP_2, capacity_factor=0, min_capacity=0, balance_loss=0, z_loss=0)
        operands = named(numbers(*DIMS))

        def total(*operands: Any) -> Any:
            return mn.reduce_sum(jitted(layer_of(gating))(*operands).output).array

        for grad in jax.jit(jax.grad(total, (0, 1, 2, 3)))(*operands):
            np.testing.assert_array_equal(grad.array, 0)

    @pytest.mark.parametrize("dispatch", ["einsum", "gather"])
    def test_places_for_all_make_it_a_sum_over_experts(self, dispatch: Any) -> None:
        gating = replace(TOP_2, capacity_factor=100.0)
        x, router, up, down = numbers(*DIMS)
        result = jitted(layer_of(gating, dispatch))(*named([x, router, up, down]))
        gates = np.exp(x @ router)
        gates = np.where(gates >= np.sort(gates)[..., -2:-1], gates, 0)
        gates /= gates.sum(-1, keepdims=True)
        of_experts = np.einsum(
            "blef,efm->blem", np.maximum(np.einsum("blm,emf->blef", x, up), 0), down
        )
        same([result.output], [np.einsum("ble,blem->blm", gates, of_experts)])
        assert not np.any(result.dropped)

    @pytest.mark.parametrize("gating", [TOP_2, SWITCH])
    def test_all_tokens_to_one_expert(self, gating: Gating) -> None:
        x, router, up, down = numbers(*DIMS)
        x, router = np.abs(x), router * 0
        router[:, 0] = 100.0
        operands = [x, router, up, down]
        result = jitted(layer_of(gating))(*named(operands))
        same(result, numpy(gating)(*operands))
        places = gating.places(mn.Dim("length", 8), True).size
        assert np.all((np.asarray(result.dropped) > 0).sum(1) == 8 - places)
        if gating is TOP_2:  # gates of all others are zero, and yet the second is not the first
            assert np.all((np.asarray(result.dropped) == 2).sum(1) == 8 - places)
            assert np.all((np.asarray(result.dropped) == 0).sum(1) == places)

    @pytest.mark.parametrize(("gating", "choices"), [(TOP_2, 2), (SWITCH, 1)])
    def test_among_equals_the_first_is_chosen(self, gating: Gating, choices: int) -> None:
        x, router, up, down = numbers(*DIMS)
        operands = [x, router * 0, up, down]
        result = jitted(layer_of(gating))(*named(operands))
        same(result, numpy(gating)(*operands))
        assert np.asarray(result.dropped).tolist() == [[0] + [choices] * 7] * 8

    @pytest.mark.parametrize("gating", [TOP_2, SWITCH])
    def test_balance_loss_is_one_where_all_is_even_and_grows_to_the_number_of_experts(
        self, gating: Gating
    ) -> None:
        gating = replace(gating, z_loss=0)
        x = np.tile(np.eye(8, dtype="float32"), [8, 1, 1])
        even, skew = 1e3 * np.eye(8, dtype="float32"), np.zeros([8, 8], "float32")
        skew[:, 3] = 1e3
        layer = jitted(layer_of(gating))
        losses = [
            float(layer(*named([x, router, *numbers(*DIMS[2:])])).loss) for router in (even, skew)
        ]
        np.testing.assert_allclose(losses, [1.0, 8.0], rtol=1e-5)

    def test_padding_goes_nowhere_and_takes_no_place(self) -> None:
        operands = numbers(*DIMS)
        present = np.random.default_rng(1).uniform(size=[8, 8]) < 0.5
        layer = jitted(layer_of(TOP_2), present=mn.named(present, "batch:8 length:8"))
        loop = Loop([TOP_2])
        expected = loop(operands[0], [operands[1]], *operands[2:], may=2 * present)
        same(layer(*named(operands)), expected)
        assert not np.any(expected[0][~present])

    def test_tokens_in_any_order_of_dims(self) -> None:
        operands = numbers(*DIMS)
        x = np.moveaxis(operands[0], -1, 0)
        result = jitted(layer_of(TOP_2))(
            mn.named(x, "d_model:8 batch:8 length:8"), *named(operands)[1:]
        )
        output, _, dropped = numpy(TOP_2)(*operands)
        assert result.output.shape == {"d_model": 8, "batch": 8, "length": 8}
        same([result.output, result.dropped], [np.moveaxis(output, -1, 0), dropped])

    def test_tokens_of_one_dim_are_one_group_and_so_are_few(self) -> None:
        x, *params = numbers(*DIMS)
        for gating in (TOP_2, replace(TOP_2, group_size=1000)):
            result = jitted(layer_of(gating))(
                mn.named(x[0], "length:8 d_model:8"), *named([x, *params])[1:]
            )
            output, loss, dropped = numpy(gating)(x[:1], *params)
            same(result, [output[0], loss, dropped[0]])

    def test_the_router_works_in_float32(self) -> None:
        operands = [jnp.asarray(x, jnp.bfloat16) for x in numbers(*DIMS)]
        halves = jitted(layer_of(TOP_2))(*named(operands))
        wholes = jitted(layer_of(TOP_2))(*named([x.astype(jnp.float32) for x in operands]))
        assert halves.output.dtype == jnp.bfloat16
        assert halves.loss.dtype == jnp.float32
        np.testing.assert_array_equal(halves.dropped.array, wholes.dropped.array)
        np.testing.assert_array_equal(halves.loss.array, wholes.loss.array)

    @pytest.mark.full
    def test_recomputed_and_scanned_over_layers(self) -> None:
        x, *params = named(numbers(*DIMS))
        layers = [jax.tree.map(lambda a, i=i: a / (i + 2), params) for i in range(2)]
        one = jax.checkpoint(lambda x, params: x + of(layer_of(TOP_2))(x, *params).output)

        def scanned(layers: Any) -> Any:
            stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
            return jax.lax.scan(lambda x, params: (one(x, params), None), x, stacked)[0].array.sum()

        def looped(layers: Any) -> Any:
            return one(one(x, layers[0]), layers[1]).array.sum()

        expected = jax.tree.leaves(jax.jit(jax.grad(looped))(layers))
        same(jax.tree.leaves(jax.jit(jax.grad(scanned))(layers)), expected)


class TestRandomPolicy:
    GATING = replace(TOP_2, second_policy="random", second_threshold=0.45)

    def test_is_the_same_under_rules(self) -> None:
        operands, key = numbers(*DIMS), jax.random.key(3)
        uniforms = jax.random.uniform(jax.random.split(key)[0], [8, 8])
        expected = numpy(self.GATING, uniforms=np.asarray(uniforms))(*operands)
        assert not np.array_equal(expected[0], numpy(TOP_2)(*operands)[0])
        with under("one axis"):
            layer = jitted(layer_of(self.GATING), key=key)
            same(layer(*named(operands)), expected)

    def test_a_second_choice_counts_with_probability_gate_over_threshold(self) -> None:
        x = np.ones([2000, 1, 8], "float32")
        router = np.zeros([8, 8], "float32")
        router[0, 0] = np.log(4)  # its gate is 0.8 of the two, and the other's 0.2
        router[:, 2:] = -100.0
        gating = replace(self.GATING, second_threshold=0.5)
        operands = [x, router, *numbers(*DIMS[2:])]
        dims = ["batch:2000 length:1 d_model:8", *DIMS[1:]]
        result = jitted(layer_of(gating), key=jax.random.key(0))(*named(operands, dims))
        first = np.asarray(result.output)[:, 0, 0]
        part = np.mean(
            first != np.unique(first)[np.argmax(np.unique(first, return_counts=True)[1])]
        )
        assert part == pytest.approx(0.4, abs=0.04)

    def test_a_key_means_training_unless_it_is_said(self) -> None:
        operands, key = named(numbers(*DIMS)), jax.random.key(0)
        gating = replace(TOP_2, capacity_factor=0.5, capacity_factor_eval=8.0)
        params = dict(zip(("router", "up", "down"), operands[1:], strict=True))
        options = [{"key": key}, {"training": True}, {}, {"key": key, "training": False}]
        dropped = jax.jit(
            lambda params, x: [layer_of(gating)(params, x, **how).dropped for how in options]
        )(params, operands[0])
        assert [bool(np.any(lost)) for lost in dropped] == [True, True, False, False]


class TestInTheTransformer:
    """It takes the place of the feed-forward layer."""

    @pytest.mark.full
    def test_losses_and_gradients_are_the_same_under_all_rules(self) -> None:
        layer = layer_of(Gating("experts:4", balance_loss=0.1))
        model = Transformer("length:8 vocab:8 d_model:8 heads:2 d_kv:4 layers:2", layer, scan=True)
        tokens = np.random.default_rng(0).integers(0, 8, [8, 8]).astype("int32")
        results = []
        for rules in ("", "batch:rows;experts:rows;d_ff:cols;heads:cols;vocab:cols"):
            with mn.rules(rules, mw.create_mesh({"rows": 4, "cols": 2})):
                params = jax.jit(model.init)(jax.random.key(0))
                batch = mn.named(tokens, "batch:8 length:8")
                step = jax.jit(jax.value_and_grad(lambda p, b: model.loss(p, b, key=KEY)))
                results.append(jax.tree.leaves(step(params, batch)))
        same(*results)


class TestErrors:
    def test_choices_that_there_are_not(self) -> None:
        with pytest.raises(mw.ModelError) as info:
            Gating("experts:4", "top_3", 0, -1.0, second_policy="never", min_capacity=-2)  # type: ignore[arg-type]
        for part in (
            "'top_3'",
            "'never'",
            "sequence; received 0",
            "capacity_factor must be at least 0; received -1.0",
            "min_capacity must be at least 0; received -2",
        ):
            assert part in str(info.value)

    def test_no_second_expert(self) -> None:
        with pytest.raises(mw.ModelError, match="needs two experts; received experts:1"):
            Gating("experts:1")

    def test_another_dispatch(self) -> None:
        with pytest.raises(mw.ModelError, match=r"'einsum' or 'gather'; received 'scatter'"):
            layer_of(TOP_2, "scatter")

    def test_no_gating(self) -> None:
        with pytest.raises(mw.ModelError, match="one Gating or more"):
            layer_of(())

    def test_a_random_policy_without_a_key(self) -> None:
        gating = replace(TOP_2, second_policy="random")
        with pytest.raises(mw.ModelError, match=r"second of experts:8 is random: give key="):
            of(layer_of(gating))(*named(numbers(*DIMS)))

    def test_a_group_that_is_no_block_of_tokens(self) -> None:
        gating = replace(TOP_2, group_size=12)
        with pytest.raises(mw.DimError, match=r"group_size=12 cannot.*can: 8 and 16\."):
            of(layer_of(gating))(*named(numbers(*DIMS)))

    def test_groups_that_do_not_divide(self) -> None:
        gating = replace(TOP_2, group_size=32)
        with under("batch"), pytest.raises(mw.DivisibilityError) as info:
            of(layer_of(gating))(*named(numbers(*DIMS)))
        for part in (
            "group_size of 32",
            "groups [batch:2]",
            "tokens [batch:8 length:8]",
            "8 devices",
        ):
            assert part in str(info.value)

    def test_an_input_that_does_not_fit(self) -> None:
        x, *params = numbers(*DIMS)
        with pytest.raises(mw.DimError, match=r"mixture of experts.*lacks d_model:8"):
            of(layer_of(TOP_2))(mn.named(x, "batch:8 length:8 other:8"), *named([x, *params])[1:])

    def test_experts_and_d_ff_along_one_axis(self) -> None:
        rules = mn.rules("experts:all;d_ff:all", mw.create_mesh({"all": 8}), strict=False)
        with rules, pytest.raises(mw.LayoutError, match="'experts:8' and 'd_ff:8'"):
            layer_of(TOP_2).init(jax.random.key(0))


def test_no_sequences_have_no_output() -> None:
    layer = mn.MixtureOfExperts("d_model:8", "d_ff:8", mn.Gating("experts:2", choose="switch"))
    x = mn.named(np.ones([0, 4, 8], "float32"), "batch:0 length:4 d_model:8")
    output, _, dropped = layer(layer.init(jax.random.key(0)), x)
    assert (output.dims, dropped.dims) == (x.dims, x.dims[:2])
    local = mn.layers.Attention("d_model:8", "heads:2", "d_kv:4", radius=2)
    none = mn.named(np.ones([2, 0, 8], "float32"), "batch:2 length:0 d_model:8")
    assert local(local.init(jax.random.key(0)), none).dims == none.dims
