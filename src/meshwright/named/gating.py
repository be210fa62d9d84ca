"""Which experts a token goes to: gates, queues of fixed capacity, and the loss that balances them.

Tokens queue in groups that the model gives, never the mesh, so no token's fate depends on how a
program is laid out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.lax import Precision

from ..errors import DimError, DivisibilityError, ModelError
from ..layouts.dim_rules import Dim, Dims, text_of
from .array import NamedArray
from .contraction import einsum
from .cumulative import cumsum
from .elementwise import add, cast, square, where
from .indexing import one_hot
from .layers.layer import as_dim
from .operation import operation
from .ordering import argmax
from .random import uniform
from .reductions import logsumexp, reduce_mean, reduce_sum, softmax
from .rules import in_force

Policy = Literal["random", "threshold", "all"]


@dataclass(frozen=True)
class Gating:
    """How tokens are shared out among experts.

    ``choose="top_2"`` sends a token to its best expert and, by a policy, to the next one, and
    weighs what they say by their gates (GShard, Lepikhin et al. 2020); ``"switch"`` sends it to the
    best alone (Fedus et al. 2021). A gate is a probability that the router gives, in float32.

    - ``group_size``: the number of tokens, neighbours in order of their dims, that queue together;
      fewer are one group. None makes each sequence of a batch a group: all dims but the first.
    - ``capacity_factor``, in evaluation ``capacity_factor_eval``: in each group an expert takes
      ``group_size * factor / experts`` tokens, rounded down, and ``min_capacity`` at least. First
      choices come before second ones, and then tokens in order. Who finds no place is dropped.
    - ``second_policy``, in evaluation ``second_policy_eval``: ``"all"`` second choices count, or
      those above ``second_threshold`` (``"threshold"``), or those below it too, with probability
      ``gate / second_threshold`` (``"random"``). Gates are those of the two, which sum to one.
    - ``balance_loss``: how much the mean over groups and experts of (part of the tokens that choose
      the expert first) times (mean of its gates), times ``experts ** 2``, counts in the loss.
    - ``z_loss``: how much the mean square of the logarithm of the sum of exponentials of the
      router's logits counts; it keeps them small (ST-MoE, Zoph et al. 2022).

    Raises :class:`ModelError` that lists every invalid choice.

    >>> Gating("experts:4", choose="switch", capacity_factor=1.0).dim
    Dim(name='experts', size=4)
    """

    experts: str | Dim
    choose: Literal["top_2", "switch"] = "top_2"
    group_size: int | None = None
    capacity_factor: float = 1.25
    capacity_factor_eval: float = 2.0
    min_capacity: int = 4
    second_policy: Policy = "random"
    second_policy_eval: Policy = "threshold"
    second_threshold: float = 0.2
    balance_loss: float = 1e-2
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if faults := [*self._faults()]:
            raise ModelError("\n".join(faults))

    def _faults(self) -> Any:
        if self.choose not in ("top_2", "switch"):
            yield f"choose must be 'top_2' or 'switch'; received {self.choose!r}."
        elif self.choose == "top_2" and self.dim.size < 2:
            yield f"choose='top_2' needs two experts; received {self.dim}. Use 'switch'."
        for name in ("second_policy", "second_policy_eval"):
            if (policy := getattr(self, name)) not in ("random", "threshold", "all"):
                yield f"{name} must be 'random', 'threshold' or 'all'; received {policy!r}."
        if self.group_size is not None and self.group_size < 1:
            size = self.group_size
            yield f"group_size must be at least 1, or None for a sequence; received {size}."
        for name in ("capacity_factor", "capacity_factor_eval", "min_capacity", "second_threshold"):
            if not (value := getattr(self, name)) >= 0:
                yield f"{name} must be at least 0; received {value!r}."

    @property
    def dim(self) -> Dim:
        """The dim of the experts."""
        return as_dim(self.experts, "experts")

    @property
    def gate(self) -> Dim:
        """One gate for each expert: a dim of its own, so that gates are whole on every device."""
        return self.dim.renamed(f"{self.dim.name}_gate")

    def places(self, group: Dim, training: bool) -> Dim:
        """The places that an expert has for tokens of a group.

        >>> print(Gating("experts:4").places(Dim("length", 32), training=True))
        experts_place:10
        """
        factor = self.capacity_factor if training else self.capacity_factor_eval
        size = max(int(group.size * factor / self.dim.size), self.min_capacity)
        return Dim(f"{self.dim.name}_place", min(size, group.size))

    def groups(self, tokens: Dims) -> tuple[Dims, Dim]:
        """The dims of the groups, and that of the tokens in one. Groups keep the names of dims.

        Raises :class:`DimError` if ``group_size`` cannot be cut from the tokens, and
        :class:`DivisibilityError` if the groups do not divide where the rules split their dims.

        >>> tokens = Dim("batch", 4), Dim("length", 32)
        >>> groups, group = Gating("experts:4", group_size=8).groups(tokens)
        >>> text_of(groups), str(group)
        ('batch:4 length:4', 'length_group:8')
        """
        count = math.prod(dim.size for dim in tokens)
        if self.group_size is None:
            size = math.prod(dim.size for dim in tokens[1:]) if len(tokens) > 1 else count
        else:
            size = min(self.group_size, count)
        cut = _cut(tokens, size)
        if cut is None:
            below, above = (
                next(n for n in sizes if _cut(tokens, n))
                for sizes in (range(size, 0, -1), range(size, count + 1))
            )
            raise DimError(
                f"group_size={size} cannot be cut from tokens [{text_of(tokens)}]: a group is a "
                "part of one dim and all of those after it. Sizes that can: "
                f"{below} and {above}."
            )
        uneven = [(dim, pieces) for dim in cut[0] if dim.size % (pieces := _pieces(dim))]
        if uneven:
            (dim, pieces), *_ = uneven
            raise DivisibilityError(
                f"a group_size of {size} makes groups [{text_of(cut[0])}] of tokens "
                f"[{text_of(tokens)}], and {str(dim)!r} does not divide over the {pieces} devices "
                "that the rules give it. Make group_size smaller: the answer depends on it, so it "
                "is not changed for you."
            )
        return cut


def _pieces(dim: Dim) -> int:
    """Over how many devices the rules in force lay a dim."""
    bound = in_force()
    return 1 if bound is None else bound.rules.pieces(dim.name, bound.mesh)


class Choice(NamedTuple):
    """One expert for each token, if it found a place there."""

    goes: NamedArray  # [.., group, gate], 1 where it goes, else 0
    expert: NamedArray  # [.., group], its number
    place: NamedArray  # [.., group], in that expert's queue, or -1
    weight: NamedArray  # [.., group], of its answer, or 0


class Route(NamedTuple):
    """Where every token goes."""

    choices: tuple[Choice, ...]  # in the order in which they queue
    loss: NamedArray  # no dims
    dropped: NamedArray  # [.., group], int32: how many of a token's choices found no place


def route(
    gating: Gating,
    router: NamedArray,
    x: NamedArray,
    features: Dims,
    group: Dim,
    *,
    may: NamedArray | None = None,
    key: Any = None,
    training: bool = False,
) -> Route:
    """Where the tokens ``x`` of dims [.., group, features] go.

    ``may`` is the number of experts that each may go to; none is 2. One that may go to a single
    expert goes to its best, but queues with the second choices, as in Mesh-TensorFlow. Raises
    :class:`ModelError` if a policy is random and there is no key.
    """
    policy = gating.second_policy if training else gating.second_policy_eval
    if gating.choose == "top_2" and policy == "random" and key is None:
        raise ModelError(
            f"whether a token goes to its second of {gating.dim} is random: give key=, or choose "
            "another policy, such as second_policy='threshold'."
        )
    capacity = gating.places(group, training).size
    return _route(gating, router, x, features, group, may, key, policy, capacity)


@operation
def _route(
    gating: Gating, router: NamedArray, x: NamedArray, features: Dims, group: Dim,
    may: NamedArray | None, key: Any, policy: Policy, capacity: int,
) -> Route:  # fmt: skip
    gate = gating.gate
    logits = _logits(router, x, features, gate)
    gates = softmax(logits, gate)
    experts = [argmax(gates, gate)]
    allowed = _allowed(may, 1 if gating.choose == "switch" else 2)
    wishes = [one_hot(experts[0], gate) * allowed]
    weights = [reduce_sum(gates * wishes[0], gate)]
    loss = gating.balance_loss * _imbalance(gates * allowed, wishes[0], group, gate)
    if gating.z_loss:
        loss = loss + gating.z_loss * reduce_mean(square(logsumexp(logits, gate)) * allowed)
    if gating.choose == "top_2":
        experts.append(argmax(where(wishes[0] > 0, -1.0, gates), gate))
        second = one_hot(experts[1], gate) * _allowed(may, 1)
        weights.append(reduce_sum(gates * second, gate))
        total = weights[0] + weights[1] + 1e-9
        weights = [weight / total for weight in weights]
        wishes.append(second * _counts(weights[1], policy, gating.second_threshold, key))
    choices, dropped = [], []
    for expert, weight, (goes, place, overflow) in zip(
        experts, weights, _queued(wishes, group, gate, capacity), strict=True
    ):
        choices.append(Choice(goes, expert, place, where(place < 0, 0.0, weight)))
        dropped.append(overflow)
    return Route(tuple(choices), loss, functools.reduce(add, dropped))


def _logits(router: NamedArray, x: NamedArray, features: Dims, gate: Dim) -> NamedArray:
    """The router works in float32, whatever the model does."""
    out = (*(dim for dim in x.dims if dim not in features), gate)
    both = [cast(x, jnp.float32), cast(router, jnp.float32)]
    return einsum(both, out, precision=Precision.HIGHEST)


def _allowed(may: NamedArray | None, number: int) -> Any:
    """Where a token may go to at least ``number`` experts."""
    return 1.0 if may is None else cast(may >= number, jnp.float32)


def _imbalance(gates: NamedArray, first: NamedArray, group: Dim, gate: Dim) -> NamedArray:
    """One if all experts are chosen equally often, and up to their number if one has it all."""
    return reduce_mean(reduce_mean(first, group) * reduce_mean(gates, group)) * gate.size**2


def _counts(weight: NamedArray, policy: Policy, threshold: float, key: Any) -> Any:
    """Where a second choice counts."""
    if policy == "all":
        return 1.0
    if policy == "threshold":
        return cast(weight > threshold, jnp.float32)
    return cast(uniform(key, weight.dims) * threshold < weight, jnp.float32)


def _queued(
    wishes: list[NamedArray], group: Dim, gate: Dim, capacity: int
) -> Iterator[tuple[NamedArray, NamedArray, NamedArray]]:
    """For each wish: who goes, the place of each, and how many find none."""
    before: Any = 0.0
    for wish in wishes:
        ahead = cumsum(wish, group, exclusive=True) + before
        goes = wish * cast(ahead < capacity, wish.dtype)
        place = reduce_sum((ahead + 1) * goes, gate) - 1
        yield goes, cast(place, jnp.int32), cast(reduce_sum(wish - goes, gate), jnp.int32)
        before = before + reduce_sum(goes, group)


def _cut(tokens: Dims, size: int) -> tuple[Dims, Dim] | None:
    """The innermost ``size`` tokens as one dim, and the other dims; ``None`` if no dims make it."""
    missing, groups, inner = size, list(tokens), list[Dim]()
    while missing > 1:
        dim = groups.pop()
        if missing % dim.size == 0:
            inner.insert(0, dim)
            missing //= dim.size
        elif dim.size % missing == 0:
            groups.append(dim.resized(dim.size // missing))
            inner.insert(0, dim.resized(missing))
            missing = 1
        else:
            return None
    names = {dim.name for dim in groups}
    own = f"{inner[0].name}_group" if inner else "group"
    name = next((dim.name for dim in inner if dim.name not in names), own)
    return tuple(groups), Dim(name, size)
