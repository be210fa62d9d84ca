"""The arguments of a placement as its fields take them, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any

from ..errors import LayoutError
from .dim_names import ANY
from .dim_rules import DimRules
from .layout import MATCH, UNSHARDED, Layout, Spec
from .layout_map import Given, as_given
from .mesh import Mesh

BatchAxes = str | tuple[str, ...] | None
BatchLike = BatchAxes | list[str] | EllipsisType  # ... is "batch", or what the rules say of it
MATCHES_NOTHING = (
    "MATCH keeps the layout that a dim has, and here it has none yet; name an axis, or leave the "
    "dim UNSHARDED."
)


def batch_by(rules: DimRules | None, batch: Any) -> Any:
    """The axes of the batch; left out, ``"batch"``, or where the rules lay the dim of that name."""
    ruled = None if rules is None else rules.spec("batch")
    if batch is ...:
        return "batch" if rules is None else ruled
    batch = tuple(batch) if isinstance(batch, list) else batch
    if ruled is not None and batch not in (ruled, (ruled,)):
        raise LayoutError(
            f"batch={batch!r} and the rule 'batch:{'+'.join(as_axes(ruled))}' give different axes "
            "for the batch. Leave batch= out, or remove the rule."
        )
    return batch


def batch_axes_faults(batch: Any, mesh: Mesh) -> list[str]:
    if batch is not None and not isinstance(batch, str | tuple):
        return [f"batch must be an axis, a tuple of axes, or None; received {batch!r}."]
    axes = as_axes(batch)
    unknown = [
        f"batch={batch!r}: the mesh ({mesh.axes_text}) has no axis {axis!r}. Use "
        f"batch={mesh.axis_names[0]!r}, or batch=None to give every device all rows."
        for axis in axes
        if axis not in mesh
    ]
    twice = sorted({axis for axis in axes if axes.count(axis) > 1})
    return unknown + [f"batch={batch!r} names axis {axis!r} more than once." for axis in twice]


def as_axes(spec: Any) -> tuple[str, ...]:
    """The axes of one entry of a layout or of a ``PartitionSpec``: a name, several or ``None``."""
    return () if spec is None else (spec,) if isinstance(spec, str) else tuple(spec)


def rules_faults(rules: DimRules | None, mesh: Mesh) -> list[str]:
    if rules is None:
        return []
    axes = "+".join(rules.axes(ANY))
    faults = [f"rule '{ANY}:{axes}': '{ANY}' names dims that are never split."] if axes else []
    try:
        rules.check(mesh)
    except LayoutError as error:
        faults.append(str(error))
    return faults


def keyed(layouts: Any, what: str) -> tuple[tuple[str | int, Given], ...]:
    """``inputs=`` as pairs: a mapping by name or position, or one layout for the only input."""
    if layouts is None:
        return ()
    if isinstance(layouts, list | tuple) and any(isinstance(item, list) for item in layouts):
        raise LayoutError(
            f"{what}={layouts!r}: one layout is a list of axes. Where there are several {what}, "
            f"name each or give its position: {what}={{0: {layouts[0]!r}, ...}}."
        )
    if not isinstance(layouts, Mapping):
        layouts = {0: layouts}
    for key in layouts:
        if not isinstance(key, str | int):
            raise LayoutError(f"{what} must be keyed by name or position; received {key!r}.")
    return tuple((key, _layout_of(f"{what}[{key!r}]", layout)) for key, layout in layouts.items())


def _layout_of(what: str, layout: Any) -> Given:
    try:
        return as_given(layout)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from None


def holds_match(layout: Given) -> bool:
    return isinstance(layout, Layout) and MATCH in layout.specs


def on_axes_of(mesh: Mesh, layout: Given) -> Given:
    """The unbound layout without the axes that a mesh does not have; names of dims as they are."""
    if not isinstance(layout, Layout):
        return layout

    def fitting(spec: Spec) -> Spec:
        if isinstance(spec, tuple):
            axes = tuple(axis for axis in spec if axis in mesh)
            return axes or UNSHARDED
        return spec if spec in (UNSHARDED, MATCH) or spec in mesh else UNSHARDED

    return Layout([fitting(spec) for spec in layout.specs], pad=layout.pad)
