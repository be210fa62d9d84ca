"""What the Transformers have in common: choices that take turns, positions, and training or not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

from ...errors import ModelError
from ...layouts.dim_rules import Dim
from ..array import NamedArray
from ..indexing import arange
from ..layers.layer import Params
from ..layers.multi_head import Attention, Bias
from ..layers.positions import RelativeBias
from .stack import Stack
from .tokens import Positions

_T = TypeVar("_T")
Turns = _T | None | Sequence[_T | None]  # one for all layers, or several that take turns

ROTARY_BASE = 10_000.0


def in_turn(choice: Any) -> tuple[Any, ...]:
    """The choices that take turns; one stands for itself."""
    return tuple(choice) if isinstance(choice, (tuple, list)) else (choice,)


def is_spare(choice: Any) -> bool:
    """Whether no layer is the usual one, so that its dims are not asked for."""
    return all(layer is not None for layer in in_turn(choice))


def check_positions(positions: Any) -> None:
    """Raise :class:`ModelError` for positions that no model has."""
    if not isinstance(positions, RelativeBias) and positions not in get_args(Positions):
        raise ModelError(
            f"positions must be one of {', '.join(map(repr, get_args(Positions)))}, or a "
            f"RelativeBias; received {positions!r}."
        )


def with_positions(attention: Attention, positions: Positions | RelativeBias) -> Attention:
    """The layer, which turns queries and keys if the positions are rotary."""
    if positions != "rotary" or attention.rotary is not None:
        return attention
    return replace(attention, rotary=ROTARY_BASE)


def relative_of(
    positions: Positions | RelativeBias, heads: Dim | None, causal: bool
) -> RelativeBias | None:
    """The bias by distance that all layers share, if these positions are one."""
    if isinstance(positions, RelativeBias):
        return positions
    if positions != "relative":
        return None
    if heads is None:
        raise ModelError("positions='relative' needs the dim 'heads', or a RelativeBias instead.")
    return RelativeBias(heads, causal=causal)


def bias_of(
    relative: RelativeBias | None, params: Params | None, stack: Stack, length: Dim | None
) -> Bias | None:
    """The bias of all layers; made once, where they look at all of a ``length`` that is known."""
    if relative is None or params is None:
        return None
    layers = [block.attention for block in stack.blocks]
    names = {layer.memory for layer in layers}
    if length is None or len(names) > 1 or not all(layer.whole for layer in layers):
        return functools.partial(relative, params)
    memory = length.renamed(names.pop())
    return relative(params, arange(memory) - arange(length))


def is_training(key: Any, training: bool | None, differs: Sequence[str], what: str) -> bool:
    """Whether a loss is for training. Raises :class:`ModelError` where only the caller can know."""
    if training is None and key is None and differs:
        raise ModelError(
            f"the loss of this {what} differs between training and evaluation "
            f"({', '.join(differs)}). Give key=jax.random.key(...) to train, or training=False to "
            "evaluate."
        )
    rates = [text for text in differs if text.startswith("dropout=")]
    if training and key is None and rates:
        raise ModelError(f"{rates[0]} draws random numbers in training: give key= as well.")
    return key is not None if training is None else training


def check_places(positions: Any, segments: NamedArray | None, places: Any) -> None:
    """Raise :class:`ModelError` for packed tokens whose places cannot be known."""
    if segments is not None and places is None and positions in ("learned", "sinusoid"):
        raise ModelError(
            f"with segments=, positions={positions!r} requires places=: the position of each token "
            "in its segment. models.pack makes both."
        )
