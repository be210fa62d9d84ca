"""Cuts that a person names: the layer that each run of blocks, or each stage, begins with."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

from ..errors import PipelineError
from ..layouts.placement import ParamInfo


def matched(cut: str, params: Sequence[ParamInfo]) -> set[str]:
    """Paths of the parameters of the layer that a cut names.

    A cut is part of a path, with dots or slashes: ``"blocks.6"`` is ``"blocks/6/kernel"``'s. Raises
    :class:`~meshwright.PipelineError` with the nearest layer if there is none of that name.
    """
    found = {
        info.path
        for info in params
        if any(_within(cut, path) for path in (info.path, *info.spellings))
    }
    if found:
        return found
    layers = _layers(params)
    near = difflib.get_close_matches(_slashed(cut), layers, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise PipelineError(
        f"cuts: no layer of the model with weights is called {cut!r}{hint} A cut names the layer "
        "that a stage begins with."
    )


def sizes_of(
    cuts: Sequence[str], blocks: Sequence[str], params: Sequence[ParamInfo]
) -> tuple[int, ...] | None:
    """How many blocks there are between cuts; ``None`` where one is not between two blocks.

    ``blocks`` has the path of the parameter that each block reads first. Raises
    :class:`~meshwright.PipelineError` for cuts that do not follow each other.

    >>> infos = [ParamInfo(f"block/{n}/w", (), (2,), "float32", 4) for n in range(5)]
    >>> sizes_of(["block.1", "block.4"], [info.path for info in infos], infos)
    (1, 3, 1)
    """
    begins = [0]
    for cut in cuts:
        named = matched(cut, params)
        first = next((number for number, path in enumerate(blocks) if path in named), None)
        if not first or not named.isdisjoint(blocks[:first]):
            return None
        begins.append(first)
    if sorted(set(begins)) != begins:
        raise PipelineError(
            f"cuts={list(cuts)} must follow each other in the order of the model; they are before "
            f"blocks {', '.join(map(str, begins[1:]))}."
        )
    begins.append(len(blocks))
    return tuple(end - first for first, end in itertools.pairwise(begins))


def _within(cut: str, path: str) -> bool:
    return f"/{_slashed(cut)}/" in f"/{_slashed(path)}/"


def _slashed(path: str) -> str:
    return path.replace(".", "/").strip("/")


def _layers(params: Iterable[ParamInfo]) -> list[str]:
    """Every beginning of a parameter's path."""
    found: dict[str, None] = {}
    for info in params:
        parts = _slashed(info.path).split("/")
        found |= dict.fromkeys("/".join(parts[: n + 1]) for n in range(len(parts)))
    return list(found)
