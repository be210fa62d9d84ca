"""Cuts that a person names: the layer that each run of blocks, or each stage, begins with."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

from ..errors import PipelineError
from ..layouts.params import ParamInfo
from ..warn import warn
from .line import Line

_MUCH = 2.0  # times what it could be, above which a cut or a stage is warned of
_MOST = 0.75  # of the FLOPs in one loop, above which it is warned of
_LOOPS = ("scan", "while")


def matched(cut: str, params: Sequence[ParamInfo]) -> set[str]:
    """Paths of the parameters of the layer that a cut names.

    A cut is part of a path, with dots or slashes: ``"blocks.6"`` is ``"blocks/6/kernel"``'s. Raises
    :class:`~meshwright.PipelineError` with the nearest layer if there is none of that name.
    """
    matches = {
        info.path
        for info in params
        if any(_within(cut, path) for path in (info.path, *info.spellings))
    }
    if matches:
        return matches
    layers = _layers(params)
    near = [layer for layer in layers if _slashed(cut) in layer]
    near += difflib.get_close_matches(_slashed(cut), layers, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise PipelineError(
        f"cuts: no layer of the model with weights is called {cut!r}{hint} A cut names the layer "
        "that a stage begins with, by whole parts of its path between slashes."
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


def line_cuts(
    line: Line, cuts: Sequence[str], params: Sequence[ParamInfo], on_cpu: bool
) -> tuple[int, ...]:
    """Where a line of equations is cut, so that each stage begins with the layer that it is named.

    Raises :class:`~meshwright.PipelineError` for cuts that do not follow each other, and warns of
    one that sends far more than the cuts that would be found without it.
    """
    places = [line.cut_before(matched(cut, params)) for cut in cuts]
    unread = [cut for cut, place in zip(cuts, places, strict=True) if place is None]
    if unread:
        raise PipelineError(f"cuts: the loss reads no weight of {', '.join(map(repr, unread))}.")
    at = [place for place in places if place is not None]
    if at[:1] == [0] or sorted(set(at)) != at:
        raise PipelineError(
            f"cuts={list(cuts)} must follow each other in the order of the model, after its first "
            "layer."
        )
    sent = [float(line.bytes_crossing[place]) for place in at]
    if inside := [cut for cut, nbytes in zip(cuts, sent, strict=True) if nbytes == float("inf")]:
        raise PipelineError(
            f"cuts: before {inside[0]!r} cross values of a dtype without gradients, which is "
            "not supported in a pipeline. Cut before another layer."
        )
    best = line.best_cuts(len(cuts) + 1, on_cpu)
    least = max(float(line.bytes_crossing[place]) for place in best)
    for cut, nbytes in zip(cuts, sent, strict=True):
        if nbytes > _MUCH * least:
            layers = ", ".join(repr(line.layer_at(place)) for place in best)
            warn(
                f"the cut before {cut!r} sends {nbytes:,.0f} bytes for each micro-batch; no more "
                f"than {least:,.0f} are sent if the model is cut before {layers}."
            )
    return tuple(at)


def warn_of_loop(line: Line, stages: int) -> None:
    """Warn where one loop, which no cut divides, has far more than a stage's share of the FLOPs."""
    total, _ = line.costs
    loops = [k for k, n in enumerate(line.order) if line.eqns[n].primitive.name in _LOOPS]
    largest = max((float(total[k + 1] - total[k]) for k in loops), default=0.0)
    share = largest / (float(total[-1]) or 1.0)
    if share > _MUCH / stages or share > _MOST:
        warn(
            f"{share:.0%} of the model's FLOPs are in one loop (lax.scan), which is not divided "
            f"between {stages} stages. If it runs over layers, write them one after the other."
        )


def _within(cut: str, path: str) -> bool:
    return f"/{_slashed(cut)}/" in f"/{_slashed(path)}/"


def _slashed(path: str) -> str:
    return path.replace(".", "/").strip("/")


def _layers(params: Iterable[ParamInfo]) -> list[str]:
    """Every beginning of a parameter's path."""
    result: dict[str, None] = {}
    for info in params:
        parts = _slashed(info.path).split("/")
        result |= dict.fromkeys("/".join(parts[: n + 1]) for n in range(len(parts)))
    return list(result)
