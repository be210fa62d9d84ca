"""Mixture of experts as a loop over tokens with queues, and layouts to try it under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from named_laws import Case

import meshwright as mw
import meshwright.named as mn
from meshwright.named.gating import Gating
from meshwright.named.moe import MixtureOfExperts

DIMS = [
    "batch:8 length:8 d_model:8",
    "d_model:8 experts_gate:8",
    "experts:8 d_model:8 d_ff:8",
    "experts:8 d_ff:8 d_model:8",
]
KEY = jax.random.key(5)
EQUAL = Gating("experts:8", min_capacity=1, second_policy="all", balance_loss=1.0, z_loss=0.5)
LAYOUTS: dict[str, Any] = {
    "none": None,
    "batch": ("batch:all", {"all": 8}),
    "experts": ("experts:all", {"all": 8}),
    "one axis": ("batch:all;experts:all", {"all": 8}),
    "two axes": ("batch:rows;experts:cols", {"rows": 4, "cols": 2}),
    "one axis and d_ff": ("batch:rows;experts:rows;d_ff:cols", {"rows": 4, "cols": 2}),
    "3-D": ("batch:rows;experts:cols;d_ff:planes", {"rows": 2, "cols": 2, "planes": 2}),
    "inside groups": ("length:rows;experts:rows;d_model:cols", {"rows": 4, "cols": 2}),
}


# The oracle: each token walks up to its experts and asks for a place.


@dataclass
class Loop:
    """What a loop over tokens finds, for groups [number of groups, tokens in one, d_model]."""

    gatings: Sequence[Gating]
    training: bool = True
    uniforms: Any = None

    def __call__(self, x: Any, routers: Any, up: Any, down: Any, may: Any = None) -> Any:
        gating, *further = self.gatings
        groups, size, _ = x.shape
        count = gating.dim.size
        places = gating.places(mn.Dim("group", size), self.training).size
        may = np.full([groups, size], 2) if may is None else may
        allowed = may >= (2 if gating.choose == "top_2" else 1)
        logits = x @ routers[0]
        gates = np.exp(logits - logits.max(-1, keepdims=True))
        gates = gates / gates.sum(-1, keepdims=True)
        first = np.zeros([groups, size, count])
        sent = np.zeros([count, groups, places, x.shape[-1]], x.dtype)
        numbers = np.zeros([count, groups, places], int)
        queues: dict[Any, int] = {}
        tickets, lost = [], np.zeros([groups, size], int)

        def ask(g: int, s: int, e: int, weight: float, number: int) -> None:
            place = queues.get((g, e), 0)
            if place == places:
                lost[g, s] += 1
                return
            queues[g, e] = place + 1
            sent[e, g, place], numbers[e, g, place] = x[g, s], number
            tickets.append((g, s, e, place, weight))

        tokens = [(g, s) for g in range(groups) for s in range(size)]
        for g, s in tokens:
            if allowed[g, s]:
                e = int(np.argmax(gates[g, s]))
                first[g, s, e] = 1
                ask(g, s, e, self.weights(gating, gates[g, s])[0], 2)
        if gating.choose == "top_2":
            for g, s in tokens:
                best, weight = np.argsort(-gates[g, s], kind="stable"), 1.0
                e = int(best[0])
                if allowed[g, s]:
                    e, weight = int(best[1]), self.weights(gating, gates[g, s])[1]
                if may[g, s] and self.counts(gating, weight, g, s):
                    ask(g, s, e, weight, 1)
        density, proxy = first.mean(1), (gates * allowed[..., None]).mean(1)
        loss = gating.balance_loss * (density * proxy).mean() * count**2
        highest = logits.max(-1)
        squares = (highest + np.log(np.exp(logits - highest[..., None]).sum(-1))) ** 2 * allowed
        loss = loss + gating.z_loss * squares.mean()
        said, inner = np.zeros_like(sent), np.zeros(numbers.shape, int)
        for e in range(count):
            if further:
                loop = replace(self, gatings=further)
                routers_of = [router[e] for router in routers[1:]]
                said[e], more, inner[e] = loop(sent[e], routers_of, up[e], down[e], numbers[e])
                loss = loss + more / count
            else:
                said[e] = np.maximum(sent[e] @ up[e], 0) @ down[e]
        out = np.zeros_like(x)
        for g, s, e, place, weight in tickets:
            out[g, s] = out[g, s] + weight * said[e, g, place]
            lost[g, s] += inner[e, g, place]
        return out, loss, lost

    def weights(self, gating: Gating, gates: Any) -> Any:
        if gating.choose == "switch":
            return [gates.max()]
        two = -np.sort(-gates)[:2]
        return two / (two.sum() + 1e-9)

    def counts(self, gating: Gating, weight: float, g: int, s: int) -> bool:
        policy = gating.second_policy if self.training else gating.second_policy_eval
        if policy == "random":
            return bool(self.uniforms[g, s] * gating.second_threshold < weight)
        return policy == "all" or bool(weight > gating.second_threshold)


def numpy(gating: Gating, group: int = 8, training: bool = True, **how: Any) -> Any:
    def call(x: Any, router: Any, up: Any, down: Any) -> Any:
        loop = Loop([gating], training, **how)
        out, loss, lost = loop(x.reshape(-1, group, x.shape[-1]), [router], up, down)
        return out.reshape(x.shape), loss, lost.reshape(x.shape[:-1])

    return call


def layer_of(gating: Any, dispatch: Any = "einsum") -> MixtureOfExperts:
    return MixtureOfExperts("d_model:8", "d_ff:8", gating, dispatch)


def of(layer: MixtureOfExperts, **how: Any) -> Any:
    """The layer as a function of arrays."""

    def call(x: Any, router: Any, up: Any, down: Any) -> Any:
        return layer({"router": router, "up": up, "down": down}, x, **{"training": True} | how)

    return call


def jitted(layer: MixtureOfExperts, **how: Any) -> Any:
    return jax.jit(of(layer, **how))


class Laid(Case):
    def rules(self, kind: str) -> Any:
        return None if LAYOUTS[kind] is None else bound(kind)


def bound(kind: str) -> Any:
    rules, axes = LAYOUTS[kind]
    return mn.BoundRules(mn.DimRules(rules), mw.create_mesh(axes))


def under(kind: str) -> Any:
    return mn.no_rules() if LAYOUTS[kind] is None else mn.rules(bound(kind), strict=False)


def numbers(*dims: str, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.normal(size=[d.size for d in mn.as_dims(dim)]).astype("float32") for dim in dims]


def named(arrays: Sequence[Any], dims: Sequence[str] = DIMS) -> list[mn.NamedArray]:
    return [mn.named(array, text) for array, text in zip(arrays, dims, strict=True)]


def same(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-4, atol=1e-4)
