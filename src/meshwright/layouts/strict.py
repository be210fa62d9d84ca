"""What is suspicious about a placement once all variables of a program are known.

A pattern with a typing error leaves its variables replicated, and the first sign is a device
without memory. So: patterns that match nothing, rules for dims that nothing has, large variables
that no pattern matches, and axes along which all devices would do the same work.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from ..equal_layers import merged
from ..errors import PlacementError
from ..warn import warn
from .dim_names import ANY, DimNames
from .layout_map import Finder, PathLayout, finds
from .params import ParamInfo, Placed
from .placement import Placement

LARGE_BYTES = 1 << 20
_NEAREST = 3
_FEW = 3  # patterns that are listed one by one


def inspect(
    placement: Placement,
    infos: Iterable[ParamInfo],
    name: str = "the program",
    stages: tuple[str, ...] = (),
    *,
    has_more_dims: bool = False,
) -> None:
    """Raise or warn about what is suspicious, each kind at once.

    ``infos`` are all the variables that the layouts are for, ``stages`` the axis of a pipeline's
    stages, which no layout takes. ``has_more_dims`` is true of programs over named dims, some of
    which only turn up when a step is traced. Raises
    :class:`~meshwright.PlacementError` for patterns that match no variable (a warning with
    ``strict=False``) and, with ``unmatched="error"``, for large variables that no pattern matches.

    >>> import meshwright as mw
    >>> placement = Placement.of(mw.Mesh({"batch": 2}), {"hiden/kernel": ["batch", None]})
    >>> inspect(placement, [ParamInfo("hidden/kernel", ("hidden/kernel",), (4, 4), "float32", 4)])
    Traceback (most recent call last):
        ...
    meshwright.errors.PlacementError: 1 pattern(s) match no variable of the program, ...
      'hiden/kernel' matches no path. The nearest: 'hidden/kernel'.
    Correct them or remove them; strict=False makes this a warning.
    """
    infos = [info for info in infos if info.role not in ("metric", "slot")]
    refuse_idle_layouts(placement, infos, name)
    if not has_more_dims:
        refuse_idle_rules(placement, infos)
    if large := unnamed(placement, infos):
        text = _unnamed_text(large, name)
        if placement.unmatched == "error":
            raise PlacementError(f"{text}Add a layout for them, or set unmatched='replicate'.")
        if placement.unmatched == "warn":
            text += "Add a layout for them; unmatched='error' refuses them, 'replicate' is silent."
            warn(text)
    idle = idle_axes(placement, placement.place(infos))
    if axes := [axis for axis in idle if axis not in stages]:
        named = " and ".join(f"{axis!r} (size {placement.mesh[axis]})" for axis in axes)
        warn(
            f"no parameter and no input of {name} lies along axis {named}: all devices along it "
            "will repeat the same work. Split something over it, add it to batch=, or make the "
            "mesh without it."
        )


def refuse_idle_layouts(
    placement: Placement, infos: Sequence[ParamInfo], name: str = "the program"
) -> None:
    """Raise :class:`~meshwright.PlacementError`, or warn, if patterns match no variable."""
    if faults := idle_layouts(placement, infos):
        text = (
            f"{len(faults)} pattern(s) match no variable of {name}, and what they were meant for "
            "may be replicated:\n" + "\n".join(merged(faults)) + "\nCorrect them or remove them"
        )
        if len(faults) == len(placement.layouts) > _FEW:
            text = _of_another_model(placement.layouts, infos, name)
        _refuse(placement, text)


def _of_another_model(layouts: Sequence[PathLayout], infos: Sequence[ParamInfo], name: str) -> str:
    """What is wrong where no pattern out of many matches anything."""
    patterns = merged(repr(entry.pattern) for entry in layouts)
    paths = merged(repr(info.path) for info in infos)
    return (
        f"none of {len(layouts)} patterns matches a variable of {name}; "
        "they are for another model.\n"
        f"  patterns: {_some(patterns)}\n  variables: {_some(paths)}\n"
        "Use the model that the layouts or the plan were made for, or make new ones"
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - 2 * _NEAREST
    return ", ".join(names[: 2 * _NEAREST]) + (f" and {more} more" if more > 0 else "")


def refuse_idle_rules(placement: Placement, infos: Sequence[ParamInfo] = ()) -> None:
    """Raise :class:`~meshwright.PlacementError`, or warn, for rules of dims that nothing has.

    For models whose dims are named in layouts, and in variables that name their own. The dim
    ``batch`` is that of their batches.

    >>> import meshwright as mw
    >>> layouts = {"kernel": mw.dims("d_model d_ff")}
    >>> placement = Placement.of(mw.Mesh({"all": 8}), layouts, rules="dff:all")
    >>> refuse_idle_rules(placement)
    Traceback (most recent call last):
        ...
    meshwright.errors.PlacementError: no dim is named as in the rule(s) 'dff:all', so they split
    nothing. Named dims: 'd_ff', 'd_model'. Correct the rules or remove them; strict=False makes
    this a warning.
    """
    if placement.rules is None:
        return
    named = _named_dims(placement, infos)
    idle = [f"'{d}:{axis}'" for d, axis in placement.rules.pairs if d not in {*named, "batch"}]
    if not idle:
        return
    matched = (
        f"Named dims: {', '.join(map(repr, named))}."
        if named
        else "Nothing has named dims: name those of weights, layouts['ffn.*kernel'] = "
        "dims('d_model d_ff')."
    )
    text = (
        f"no dim is named as in the rule(s) {', '.join(idle)}, so they split nothing. {matched} "
        "Correct the rules or remove them"
    )
    _refuse(placement, text)


def _refuse(placement: Placement, text: str) -> None:
    if placement.strict:
        raise PlacementError(f"{text}; strict=False makes this a warning.")
    warn(f"{text}.")


def _named_dims(placement: Placement, infos: Sequence[ParamInfo]) -> list[str]:
    layouts = [entry.layout for entry in (*placement.layouts, *placement.activations)]
    layouts += [layout for _, layout in (*placement.inputs, *placement.targets)]
    names = [layout.names for layout in layouts if isinstance(layout, DimNames)]
    names += [info.names.names for info in infos if info.names is not None]
    return sorted({name for row in names for name in row} - {ANY})


def idle_layouts(placement: Placement, infos: Sequence[ParamInfo]) -> list[str]:
    """A sentence for each pattern that matches none of the variables."""
    finder = Finder(placement.layouts)
    placing = {finder.find(info.spellings) for info in infos}
    return [
        f"  {_why_idle(entry, finder, infos)}"
        for entry in placement.layouts
        if entry not in placing
    ]


def unnamed(placement: Placement, infos: Sequence[ParamInfo]) -> list[Placed]:
    """Large parameters that every device holds whole because no pattern matches them.

    Without any layout, or with level 3 of ZeRO where it shares them out, that is as it is meant.
    """
    if not placement.layouts or placement.mesh.size == 1:
        return []
    finder = Finder(placement.layouts)
    return [
        entry
        for entry in placement.place(infos)
        if entry.info.role == "parameter"
        and entry.info.nbytes >= LARGE_BYTES
        and entry.layout.is_fully_replicated
        and entry.info.asked is None
        and finder.find(entry.info.spellings) is None
    ]


def idle_axes(placement: Placement, placed: Iterable[Placed]) -> list[str]:
    """Axes of the mesh along which nothing is split."""
    layouts = [variable.layout for variable in placed]
    layouts += [placement.layout(layout) for _, layout in (*placement.inputs, *placement.targets)]
    layouts += [placement.layout(entry.layout) for entry in placement.activations]
    used = {axis for layout in layouts for axis in layout.axes} | set(placement.batch_axes)
    return [axis for axis, size in placement.mesh.axes if size > 1 and axis not in used]


def _why_idle(entry: PathLayout, finder: Finder, infos: Sequence[ParamInfo]) -> str:
    matches = [info for info in infos if finds(entry.pattern, info.spellings)]
    if not matches:
        near = _nearest(entry.pattern, infos)
        hint = f" The nearest: {', '.join(map(repr, near))}." if near else ""
        return f"{entry.pattern!r} matches no path.{hint}"
    others = {finder.find(info.spellings) for info in matches}
    takers = ", ".join(sorted(repr(other.pattern) for other in others if other is not None))
    more = f" and {len(matches) - 1} more" if len(matches) > 1 else ""
    return (
        f"{entry.pattern!r} is shadowed: what it matches ({matches[0].path!r}{more}) is laid "
        f"out by {takers}."
    )


def _nearest(pattern: str, infos: Sequence[ParamInfo]) -> list[str]:
    """The paths that look most like a pattern, whose signs of regular expressions do not count."""
    plain = re.sub(r"[\\^$()?+\[\]{}*|]|\.\*", "", pattern)
    spelled = {path: info.path for info in infos for path in (info.path, *info.spellings)}
    close = difflib.get_close_matches(plain, spelled, n=2 * _NEAREST, cutoff=0.5)
    return list(dict.fromkeys(spelled[path] for path in close))[:_NEAREST]


def _unnamed_text(large: list[Placed], name: str) -> str:
    lines = merged(
        f"  {entry.info.path} {entry.info.dims}: {entry.info.nbytes:,} bytes"
        for entry in sorted(large, key=lambda entry: -entry.info.nbytes)
    )
    total = sum(entry.info.nbytes for entry in large)
    return (
        f"no pattern matches {len(large)} large parameter(s) of {name}, so every device holds them "
        f"whole, {total:,} bytes in all:\n" + "\n".join(lines) + "\n"
    )
