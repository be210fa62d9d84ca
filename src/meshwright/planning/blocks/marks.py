"""Name scopes that tell in a compiled program which of the equal blocks an instruction is of."""

from __future__ import annotations

import re

_MARK = re.compile(r"mw_equal_block_(\d+)_")


def mark_of(block: int) -> str:
    """The name scope of a block.

    >>> marked("jit(step)/transpose(jvp(" + mark_of(1) + "))/ffn/dot_general")
    1
    """
    return f"mw_equal_block_{block}_"


def marked(path: str) -> int | None:
    """Which block a path of name scopes is of; ``None`` outside of them."""
    match = _MARK.search(path)
    return int(match[1]) if match else None


def unmarked(text: str) -> str:
    """A program without these scopes.

    >>> unmarked("jit(step)/jvp(mw_equal_block_0_)/ffn/dot")
    'jit(step)/jvp()/ffn/dot'
    """
    return _MARK.sub("", text)


def without(path: str) -> str:
    """A layer's path without these scopes.

    >>> without("mw_equal_block_1_/block_1/ffn")
    'block_1/ffn'
    """
    return "/".join(part for part in path.split("/") if not _MARK.fullmatch(part))
