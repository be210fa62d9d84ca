"""Sending tokens to the experts that they chose, and fetching what these say."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from ..layouts.dim_rules import Dim, Dims
from .array import NamedArray
from .contraction import einsum
from .elementwise import add, cast, where
from .gating import Choice
from .indexing import gather, one_hot, scatter_add
from .operation import operation
from .rules import in_force
from .shapes import merge_dims, rename, split_dim

Dispatch = Literal["einsum", "gather"]


@dataclass(frozen=True)
class Post:
    """The way between tokens, in groups, and experts, each of which has places for some of a group.

    Tokens have dims [groups, group, features] and ``experts`` get [experts, groups, places,
    features]. ``gate`` is a dim like that of the experts which no rule splits.
    """

    choices: tuple[Choice, ...]
    groups: Dims
    group: Dim
    experts: Dim
    gate: Dim
    places: Dim
    dispatch: Dispatch

    def send(self, x: NamedArray) -> NamedArray:
        """The tokens, where the experts are."""
        return rename(_send(self, x, self._box), self._exchange)

    def send_numbers(self) -> NamedArray:
        """For each place, to how many experts its token may go further on: 0 if there is none."""
        return rename(_send_numbers(self, self._box), self._exchange)

    def fetch(self, y: NamedArray, weighed: bool = True) -> NamedArray:
        """What the experts say to each token, added up; zeros where it found no place."""
        back = {new: old for old, new in self._exchange.items()}
        return _fetch(self, rename(y, back), self._box, weighed)

    @property
    def by_products(self) -> bool:
        """Whether tokens are sent by products with one-hot arrays."""
        return self.dispatch == "einsum" or not self.places.size  # nothing is gathered from nothing

    @property
    def _shared(self) -> tuple[str, ...] | None:
        """The axes along which both the tokens and the experts lie."""
        axes = _axes(self.experts)
        return axes if axes in {_axes(dim) for dim in (*self.groups, self.group)} else None

    @property
    def _box(self) -> Dim:
        """The dim of the experts while the tokens still lie where they were."""
        return self.experts if self._shared is None else self.gate

    @property
    def _exchange(self) -> dict[str, str]:
        """Other names for dims, by which an axis goes from the groups to the experts."""
        if self._shared is None:
            return {}
        along = [dim for dim in self.groups if _axes(dim) == self._shared]
        return {self.gate.name: self.experts.name} | {d.name: f"{d.name}_whole" for d in along}


def _axes(dim: Dim) -> tuple[str, ...] | None:
    bound = in_force()
    return None if bound is None else bound.rules.axes(dim.name) or None


@operation
def _send(post: Post, x: NamedArray, box: Dim) -> NamedArray:
    out = (box, *(post.places if dim == post.group else dim for dim in x.dims))
    if post.by_products:
        return einsum([cast(_where_to(post, box, 1, 1), x.dtype), x], out)
    boxes = _boxes(post, box)
    dims = tuple(boxes if dim == post.group else dim for dim in x.dims)
    filled = NamedArray(jnp.zeros([dim.size for dim in dims], x.dtype), dims)
    for choice in post.choices:
        filled = scatter_add(filled, _number(post, choice), x, boxes)
    return split_dim(filled, boxes, (box, post.places))


@operation
def _send_numbers(post: Post, box: Dim) -> NamedArray:
    out = (box, *post.groups, post.places)
    return cast(einsum([_where_to(post, box, 2, 1)], out), jnp.int32)


@operation
def _fetch(post: Post, y: NamedArray, box: Dim, weighed: bool) -> NamedArray:
    weights = [choice.weight if weighed else 1.0 for choice in post.choices]
    rest = [dim for dim in y.dims if dim not in (box, post.places, *post.groups)]
    if post.by_products:
        combine = cast(_where_to(post, box, *weights), y.dtype)
        return einsum([combine, y], (*post.groups, post.group, *rest))
    boxes = _boxes(post, box)
    merged = merge_dims(y, (box, post.places), box.name)
    answers = _total(
        gather(merged, _number(post, choice), boxes) * weight
        for choice, weight in zip(post.choices, weights, strict=True)
    )
    return cast(answers, y.dtype)


def _where_to(post: Post, box: Dim, *weights: Any) -> NamedArray:
    """[groups, group, box, places]: a weight where a token goes, else zero."""
    return _total(  # of two weights a switch takes the first
        rename(choice.goes, post.gate.name, box.name) * one_hot(choice.place, post.places) * weight
        for choice, weight in zip(post.choices, weights, strict=False)
    )


def _total(arrays: Iterable[NamedArray]) -> NamedArray:
    return functools.reduce(add, arrays)


def _boxes(post: Post, box: Dim) -> Dim:
    """All places of all experts."""
    return box.resized(box.size * post.places.size)


def _number(post: Post, choice: Choice) -> NamedArray:
    """The place among all places of all experts, or -1."""
    return where(choice.place < 0, -1, choice.expert * post.places.size + choice.place)
