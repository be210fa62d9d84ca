"""The equal blocks of a step, as stages take them: also layers of a loop, and some frozen ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..abstract_step import AbstractStep
from ..blocks import Reduced, reduced
from ..blocks.fewer import repeated_in
from ..blocks.own_weights import by_entry, thawed

_LEAST = 2


@dataclass(frozen=True, eq=False)
class EqualBlocks:
    """Equal blocks of a step: those of ``repeats`` have trained weights of their own.

    ``entries`` says of which stacked weight each is which entry, where layers are a loop.
    ``frozen_bytes`` are of weights that some blocks have frozen, which lie whole beside the stages.
    """

    repeats: Reduced
    entries: Mapping[str, tuple[str, int]] = field(default_factory=dict, repr=False)
    frozen_bytes: int = 0

    @property
    def are_of_loop(self) -> bool:
        """Whether the model has their weights stacked, and goes through them in a loop."""
        return bool(self.entries)


def equal_blocks(
    described: AbstractStep, is_loop: bool | None = None
) -> tuple[EqualBlocks | None, str]:
    """Those of a step without stages, or ``None`` and why there are none.

    ``is_loop`` says whether stages are cut of its loop over layers; where that is not known, they
    are if it has no other equal blocks.
    """
    reason = ""
    if not is_loop:
        blocks, reason = repeated_in(described, _LEAST)
        if blocks is not None:
            repeats, reason = blocks.reduced(described)
            if repeats is not None:
                return EqualBlocks(repeats), ""
            return _of_frozen(described, blocks.rows, reason)
    written = by_entry(described) if is_loop is not False else None
    if written is None:
        return None, reason
    repeats, of_loop = reduced(written.step, _LEAST)
    if repeats is None:
        return None, of_loop or reason
    return EqualBlocks(repeats, written.entries), ""


def _of_frozen(
    described: AbstractStep, rows: tuple[tuple[str, ...], ...], reason: str
) -> tuple[EqualBlocks | None, str]:
    step = thawed(described, rows)
    if step is None:
        return None, reason
    repeats, reason = reduced(step.step, _LEAST)
    blocks = None if repeats is None else EqualBlocks(repeats, frozen_bytes=step.frozen_bytes)
    return blocks, reason
