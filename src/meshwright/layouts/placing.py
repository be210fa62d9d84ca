"""Where a placement puts variables: by pattern, by named dims, after an owner, by ZeRO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..equal_layers import merged
from ..errors import DimError, LayoutError, PlacementError
from .dim_names import DimNames
from .layout import MATCH, UNSHARDED, Layout
from .layout_map import Finder, PathLayout, names_exactly
from .params import Follows, ParamInfo, Placed
from .placement_arguments import MATCHES_NOTHING
from .zero import share_out

if TYPE_CHECKING:
    from .placement import Placement

_BY_LAYER = "the layer's own argument"
_PADDING = "A layout with pad=True pads such a weight where a step stores it, and only there."


def place(placement: Placement, infos: Iterable[ParamInfo]) -> list[Placed]:
    """See :meth:`Placement.place`."""
    infos = list(infos)
    variables = _Variables(placement)
    ruled: dict[ParamInfo, Placed] = {}
    faults: list[str] = []
    could_be_padded = False
    for info in dict.fromkeys(i for i in infos if i.role != "slot"):
        try:
            ruled[info] = variables.place_one(info)
            faults_here = _faults_of(ruled[info])
            could_be_padded |= ruled[info].layout.rank == len(info.dims) and bool(faults_here)
        except _NamedDimsError as error:
            faults_here = [str(error)]
        except LayoutError as error:
            faults_here = [f"{_opening(info, info.asked, _BY_LAYER)}: {error}"]
        if faults_here:
            faults.append("\n".join(faults_here))
    if faults:
        raise PlacementError(
            f"{len(faults)} variable(s) cannot be laid out on the mesh "
            f"({placement.mesh.axes_text}); nothing was allocated.\n"
            + "\n".join(merged(faults) + [_PADDING] * could_be_padded)
        )
    owners = {info.path: placed for info, placed in ruled.items()}
    if placement.zero == 3:
        ruled = {info: variables.shared_out(placed) for info, placed in ruled.items()}
    return [ruled.get(info) or variables.slot(info, owners) for info in infos]


class _Variables:
    """Where a placement puts one variable after the other."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._find = Finder(placement.layouts).find
        self.mesh, self.rules = placement.mesh, placement.rules

    def place_one(self, info: ParamInfo) -> Placed:
        replicated = Layout.replicated(self.mesh, len(info.dims))
        if info.role in ("seed", "metric"):
            return Placed(info, replicated, f"{info.role}: replicated")
        entry = self._find(info.spellings)
        kernel = info.follows
        if kernel is not None and entry in (None, self._find(kernel.spellings)):
            return self._following(info, kernel)
        if info.asked is not None:
            return _padded(info, self._layout_of_layer(info, entry), _BY_LAYER)
        if entry is not None:
            reason = f"layout '{entry.pattern}'"
            if isinstance(entry.layout, DimNames):
                return self._by_names(info, entry.layout, reason)
            return _padded(info, entry.layout.on(self.mesh), reason)
        if info.names is not None and self.rules is not None:
            return self._by_names(info, info.names)
        return Placed(info, replicated, "no layout: replicated", info.names)

    def _by_names(self, info: ParamInfo, names: DimNames, source: str = "") -> Placed:
        """Where a variable lies whose dims have names. Raises if that cannot be."""
        assert self.rules is not None
        try:
            dims = names.of(info.dims)
            bound = None if names.pad else self.mesh
            self.rules.layout(dims, bound, "the variable")
        except (DimError, LayoutError) as error:
            whose = f", dims [{names}] by {source}" if source else ""
            lines = str(error).splitlines()
            raise _NamedDimsError(
                "\n".join(f"  {info.path} {info.dims}{whose}: {line}" for line in lines)
            ) from None
        splitting = [f"{n}:{'+'.join(a)}" for n in names.names if (a := self.rules.axes(n))]
        reason = (
            ", ".join([source] * bool(source) + splitting) or "no rule for its dims: replicated"
        )
        placed = _padded(info, names.layout(self.rules).on(self.mesh), reason)
        return placed._replace(names=names)

    def _following(self, info: ParamInfo, kernel: Follows) -> Placed:
        """Where a variable lies as its kernel does, whole along dims that do not divide."""
        whole = replace(
            info, dims=kernel.dims, spellings=kernel.spellings, asked=kernel.asked, follows=None
        )
        placed = self.place_one(whole)
        layout = placed.layout
        if layout.rank != len(kernel.dims):  # a fault of the layout, which is listed for the kernel
            replicated = Layout.replicated(self.mesh, len(info.dims))
            return placed if kernel.path == info.path else Placed(info, replicated, placed.reason)
        specs = [UNSHARDED if dim is None else layout.specs[dim] for dim in kernel.along]
        layout = Layout(specs, self.mesh).fitting(info.dims)
        whose = "packed" if kernel.path == info.path else f"as {kernel.path}"
        return Placed(info, layout, f"{placed.reason}, {whose}")

    def slot(self, info: ParamInfo, owners: Mapping[str, Placed]) -> Placed:
        owner = owners.get(info.owner or "")
        if owner is not None and owner.info.dims == info.dims:
            slot = Placed(info, owner.layout, f"slot of {owner.info.path}", owner.names)
        elif info.asked is not None:
            return Placed(info, info.asked.on(self.mesh), "slot: a row for each device")
        elif info.names is not None and self.rules is not None:
            slot = self._by_names(info, info.names)  # a part of its parameter, such as its rows
        else:
            replicated = Layout.replicated(self.mesh, len(info.dims))
            slot = Placed(info, replicated, "slot of several parameters, or of a part of one")
            shared = self.shared_out(slot) if self._placement.zero else slot
            return (
                shared if shared.layout != replicated else slot._replace(reason="slot: replicated")
            )
        return self.shared_out(slot) if self._placement.zero else slot

    def shared_out(self, placed: Placed) -> Placed:
        """What ZeRO makes of a parameter or a slot; the reason says so either way."""
        if placed.info.role not in ("parameter", "slot"):
            return placed
        layout = share_out(placed.layout, placed.stored_dims, self._placement.batch_axes)
        says = f"zero={self._placement.zero}" + ("" if layout else ": small, or no dim divides")
        return placed._replace(layout=layout or placed.layout, reason=f"{placed.reason}, {says}")

    def _layout_of_layer(self, info: ParamInfo, entry: PathLayout | None) -> Layout:
        """The layer's own layout. It beats a pattern; one that is this very path contradicts it."""
        assert info.asked is not None
        if entry is not None and names_exactly(entry.pattern, info.spellings):
            own = self._placement.layout(entry.layout).unbound()
            if own != info.asked.unbound():
                raise LayoutError(
                    f"the variable is laid out twice: layout {entry.pattern!r} names this very "
                    f"path and gives {own}. Keep one of the two."
                )
        if MATCH in info.asked.specs:
            raise LayoutError(MATCHES_NOTHING)
        return info.asked.on(self.mesh)


class _NamedDimsError(LayoutError):
    """A variable's named dims that the rules cannot lay out, in whole lines."""


def _padded(info: ParamInfo, layout: Layout, reason: str) -> Placed:
    """The variable in this layout, which says that it pads only where something is padded."""
    if not layout.pad or layout.rank != len(info.dims):
        return Placed(info, layout, reason)
    stored = layout.stored_dims(info.dims)
    if stored == info.dims:
        return Placed(info, Layout(layout.specs, layout.mesh), reason)
    return Placed(info, layout, f"{reason}, stored as {'x'.join(map(str, stored))}")


def _faults_of(placed: Placed) -> list[str]:
    opening = _opening(placed.info, placed.layout, placed.reason)
    fits = placed.layout.rank == len(placed.info.dims)
    dims = placed.stored_dims if fits else placed.info.dims
    return [f"{opening}: {fault}" for fault in placed.layout.faults(dims, "the variable")]


def _opening(info: ParamInfo, layout: Layout | None, reason: str) -> str:
    specs = "" if layout is None else f", {layout.unbound()} by {reason}"
    return f"  {info.path} {info.dims}{specs}"
