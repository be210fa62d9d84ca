"""The placement: where every variable, slot, input and activation of a model lies.

A frozen value that knows no Keras and no device. It answers questions about
:class:`ParamInfo` descriptions; front ends ask them and act on the answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from ..errors import BatchError, DimError, LayoutError, MeshError, PlacementError
from ..merging import merged
from .dim_names import DimNames
from .dim_rules import DimRules, RulesLike
from .layout import MATCH, UNSHARDED, Layout, Spec
from .layout_map import Given, LayoutMap, PathLayout, find_layout, names_exactly
from .mesh import Mesh
from .placement_arguments import (
    BatchAxes,
    BatchLike,
    as_axes,
    batch_axes_faults,
    batch_by,
    holds_match,
    keyed,
    on_axes_of,
    rules_faults,
)
from .zero import check_level, share_out

Unmatched = Literal["warn", "error", "replicate"]
Role = Literal["parameter", "state", "slot", "seed", "metric"]

_BY_LAYER = "the layer's own argument"
_PADDING = "A layout with pad=True pads such a weight where a step stores it, and only there."
_MATCHES_NOTHING = (
    "MATCH keeps the layout that a dim has, and here it has none yet; name an axis, or leave the "
    "dim UNSHARDED."
)

_PADS_WEIGHTS = (
    "pad=True is for weights. Batches are padded by themselves, and activations that do not divide "
    "are kept whole; leave pad out."
)


class Follows(NamedTuple):
    """A variable whose dims are some of another one's, as a kernel's scales are.

    ``spellings`` and ``asked`` are those of the other one, which was built with ``dims``; ``along``
    says which of them each dim of this variable is, ``None`` for one that it has alone.
    """

    path: str
    spellings: tuple[str, ...]
    dims: tuple[int, ...]
    along: tuple[int | None, ...]
    asked: Layout | None = None


@dataclass(frozen=True)
class ParamInfo:
    """What is known of one variable without its value.

    ``path`` is its name inside its model and unique there; ``spellings`` are all the paths that a
    rule may name it by (Keras' path, the path of layer names, the path of attributes). ``dims`` is
    its size per dim, ``dtype`` its type and ``itemsize`` the bytes of one element. ``role`` is
    ``"parameter"``, ``"slot"``, ``"state"`` or ``"metric"``. ``owner`` is, for a slot, the path of
    its parameter. ``lasting`` is the path that it has again when its model is built again.
    ``asked`` is the layout that an argument of its layer gives, ``names`` the names of its dims,
    and ``follows`` the kernel whose rule it follows where it has none of its own.

    >>> info = ParamInfo("hidden/kernel", ("hidden/kernel",), (784, 128), "float32", itemsize=4)
    >>> info.role, info.dims
    ('parameter', (784, 128))
    """

    path: str
    spellings: tuple[str, ...]
    dims: tuple[int, ...]
    dtype: str
    itemsize: int
    role: Role = "parameter"
    owner: str | None = None  # for a slot: the path of its parameter
    lasting: str | None = None  # the path that it has again when its model is built again
    asked: Layout | None = None  # the layout that the model itself asks for, in a layer's argument
    names: DimNames | None = None  # of its dims, where the model itself names them
    follows: Follows | None = None  # the kernel that it belongs to, where it has no rule of its own

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable."""
        return math.prod(self.dims) * self.itemsize


class Placed(NamedTuple):
    """A variable with the layout that it gets and the reason why."""

    info: ParamInfo
    layout: Layout
    reason: str
    names: DimNames | None = None  # of its dims, where they are named

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Its dims as a training step stores it: larger where the layout pads it."""
        return self.layout.stored_dims(self.info.dims)

    @property
    def unpadded(self) -> Layout:
        """How it lies with its own dims: whole along those that do not divide."""
        return self.layout.fitting(self.info.dims) if self.layout.pad else self.layout

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device of the mesh holds while it trains."""
        return self.layout.shard_bytes(self.stored_dims, self.info.itemsize)


@dataclass(frozen=True)
class Placement:
    """The layouts of a whole program on a ``mesh``: variables, inputs, targets, activations.

    ``layouts`` are for variables and ``activations`` for the outputs of layers, by path. ``batch``
    is the axis, or axes, of the first dim of every input and target that ``inputs`` and ``targets``
    do not name; ``None`` leaves them replicated. ``zero`` is the level of ZeRO over the batch axes,
    see :mod:`~meshwright.layouts.zero`. ``unmatched`` says what becomes of large parameters that no
    pattern matches, and ``strict=False`` makes a pattern that matches nothing a warning; see
    :mod:`~meshwright.layouts.strict`. ``rules`` lay out whatever has named dims: what a layout
    above gives as :func:`~meshwright.dims`, and the variables of a program over named dims.
    :meth:`of` makes one from friendlier arguments. Raises :class:`LayoutError` with every fault.

    >>> placement = Placement.of(Mesh({"batch": 4, "model": 2}), {"w": [None, "model"]}, zero=1)
    >>> placement.batch, placement.zero, len(placement.layouts)
    ('batch', 1, 1)
    """

    mesh: Mesh
    layouts: tuple[PathLayout, ...] = ()
    batch: BatchAxes = "batch"
    inputs: tuple[tuple[str | int, Given], ...] = ()
    targets: tuple[tuple[str | int, Given], ...] = ()
    activations: tuple[PathLayout, ...] = ()
    zero: int = 0
    unmatched: Unmatched = "warn"
    strict: bool = True
    rules: DimRules | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise MeshError(
                "expected a mesh, such as mw.create_mesh({'batch': 8}); received " + repr(self.mesh)
            )
        check_level(self.zero)
        if self.unmatched not in get_args(Unmatched):
            raise LayoutError(
                "unmatched must be 'warn', 'error' or 'replicate', for large parameters that no "
                f"pattern matches; received {self.unmatched!r}."
            )
        weights = [(f"layout {entry.pattern!r}", entry.layout) for entry in self.layouts]
        arrays = [(f"the layout of input {key!r}", layout) for key, layout in self.inputs]
        arrays += [(f"the layout of target {key!r}", layout) for key, layout in self.targets]
        outputs = [(f"activation {entry.pattern!r}", entry.layout) for entry in self.activations]
        faults = [f"{what}: {_MATCHES_NOTHING}" for what, x in weights + arrays if holds_match(x)]
        faults += rules_faults(self.rules, self.mesh)
        for what, asked in weights:  # rules are checked later, with the variables' sizes
            if isinstance(asked, Layout) or self.rules is None:
                faults += self._binding_faults(what, asked)
        for what, asked in arrays + outputs:
            faults += self._binding_faults(what, asked)
        faults += [f"{what}: {_PADS_WEIGHTS}" for what, asked in arrays + outputs if asked.pad]
        if self.zero and self.batch is None:
            faults.append(
                f"zero={self.zero} shards state over the axes of the batch, but batch=None "
                "names none. Name them, or set zero=0."
            )
        if faults := faults + batch_axes_faults(self.batch, self.mesh):
            raise LayoutError("\n".join(faults))

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        layouts: LayoutMap | Mapping[str, Any] | None = None,
        batch: BatchLike = ...,
        inputs: Any = None,
        targets: Any = None,
        activations: Mapping[str, Any] | None = None,
        zero: int = 0,
        unmatched: Unmatched = "warn",
        strict: bool = True,
        rules: RulesLike | None = None,
    ) -> Placement:
        """A placement from a layout map, or any mapping, and bare sequences of axes.

        ``rules`` lay out what has named dims, ``"batch:rows;d_ff:cols"``; the batch then lies along
        the axis of the dim ``batch``, unless ``batch`` says otherwise.

        >>> import meshwright as mw
        >>> mesh = mw.Mesh({"rows": 4, "cols": 2})
        >>> placement = Placement.of(
        ...     mesh, {"ffn.*kernel": mw.dims("d_model d_ff")}, rules="batch:rows;d_ff:cols"
        ... )
        >>> placement.batch
        'rows'
        >>> kernel = ParamInfo("ffn/kernel", ("ffn/kernel",), (8, 6), "float32", 4)
        >>> print(placement.place([kernel])[0].layout)
        [unsharded, cols] on rows=4, cols=2
        """
        dims = None if rules is None else DimRules(rules)
        return cls(
            mesh=mesh,
            layouts=LayoutMap(layouts={} if layouts is None else layouts).entries,
            batch=batch_by(dims, batch),
            inputs=keyed(inputs, "inputs"),
            targets=keyed(targets, "targets"),
            activations=LayoutMap(layouts={} if activations is None else activations).entries,
            zero=zero,
            unmatched=unmatched,
            strict=strict,
            rules=dims,
        )

    def on(self, mesh: Mesh, rules: RulesLike | None = None) -> Placement:
        """The same on another mesh, and with other rules for named dims, where they are given.

        Raises :class:`LayoutError` for axes that the mesh does not have.
        """
        if rules is None:
            return replace(self, mesh=mesh)
        dims = DimRules(rules)
        follows = self.batch_axes == as_axes(batch_by(self.rules, ...))
        batch = batch_by(dims, ... if follows else self.batch)
        return replace(self, mesh=mesh, rules=dims, batch=batch)

    def serving(self, mesh: Mesh) -> Placement:
        """The same on another mesh, to compute the forward pass alone: without ZeRO.

        An axis that the mesh does not have splits nothing there.

        >>> import meshwright as mw
        >>> trained = Placement.of(mw.Mesh({"batch": 4, "model": 2}), {"w": ["batch", "model"]})
        >>> served = trained.serving(mw.Mesh({"model": 8}))
        >>> served.batch, str(served.layouts[0].layout)
        (None, '[unsharded, model]')
        """

        def fitting(given: Given) -> Given:
            return on_axes_of(mesh, given) if isinstance(given, Layout) else given

        def by_path(entries: tuple[PathLayout, ...]) -> tuple[PathLayout, ...]:
            return tuple(entry._replace(layout=fitting(entry.layout)) for entry in entries)

        axes = tuple(axis for axis in self.batch_axes if axis in mesh)
        rules = self.rules
        if rules is not None:
            kept = {dim: [a for a in rules.axes(dim) if a in mesh] for dim, _ in rules.pairs}
            rules = DimRules([(dim, "+".join(axes)) for dim, axes in kept.items() if axes])
        return replace(
            self,
            mesh=mesh,
            layouts=by_path(self.layouts),
            batch=axes[0] if len(axes) == 1 else axes or None,
            inputs=tuple((key, fitting(given)) for key, given in self.inputs),
            targets=(),
            activations=by_path(self.activations),
            zero=0,
            rules=rules,
        )

    def naming(self, inputs: Iterable[tuple[int, DimNames]]) -> Placement:
        """The same, with dims named for inputs, by position, that have no layout yet."""
        if self.rules is None:
            return self
        return replace(self, inputs=(*inputs, *self.inputs))

    def layout(self, asked: Given) -> Layout:
        """An unbound layout as it is, or that of named dims by the rules."""
        if isinstance(asked, Layout):
            return asked
        if self.rules is None:
            raise LayoutError(
                f"its dims are named [{asked}], and nothing says along which axes they lie: give "
                "the rules as well, rules='batch:rows;d_ff:cols', or axes in place of the names."
            )
        return asked.layout(self.rules)

    def with_zero(self, zero: int) -> Placement:
        """The same rules at another level of ZeRO."""
        return replace(self, zero=zero)

    # Variables

    def place(self, infos: Iterable[ParamInfo]) -> list[Placed]:
        """The layout of each variable and why. A slot follows its owner, if that is in ``infos``.

        Raises one :class:`PlacementError` that lists every variable whose layout does not fit.
        """
        infos = list(infos)
        ruled: dict[ParamInfo, Placed] = {}
        faults: list[str] = []
        could_be_padded = False
        for info in dict.fromkeys(i for i in infos if i.role != "slot"):
            try:
                ruled[info] = self._place_one(info)
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
                f"({self.mesh.axes_text}); nothing was allocated.\n"
                + "\n".join(merged(faults) + [_PADDING] * could_be_padded)
            )
        owners = {info.path: placed for info, placed in ruled.items()}
        if self.zero == 3:
            ruled = {info: self._shared_out(placed) for info, placed in ruled.items()}
        return [ruled.get(info) or self._slot(info, owners) for info in infos]

    def _place_one(self, info: ParamInfo) -> Placed:
        replicated = Layout.replicated(self.mesh, len(info.dims))
        if info.role in ("seed", "metric"):
            return Placed(info, replicated, f"{info.role}: replicated")
        entry = find_layout(self.layouts, info.spellings)
        kernel = info.follows
        if kernel is not None and entry in (None, find_layout(self.layouts, kernel.spellings)):
            return self._following(info, kernel)
        if info.asked is not None:
            return _padded(info, self._asked(info, entry), _BY_LAYER)
        if entry is not None:
            reason = f"layout '{entry.pattern}'"
            if isinstance(entry.layout, DimNames):
                return self._by_names(info, entry.layout, reason)
            return _padded(info, entry.layout.on(self.mesh), reason)
        if info.names is not None and self.rules is not None:
            return self._by_names(info, info.names)
        return Placed(info, replicated, "no layout: replicated", info.names)

    def _by_names(self, info: ParamInfo, names: DimNames, rule: str = "") -> Placed:
        """Where a variable lies whose dims have names. Raises if that cannot be."""
        assert self.rules is not None
        try:
            dims = names.of(info.dims)
            bound = None if names.pad else self.mesh
            self.rules.layout(dims, bound, "the variable")
        except (DimError, LayoutError) as error:
            whose = f", dims [{names}] by {rule}" if rule else ""
            lines = str(error).splitlines()
            raise _NamedDimsError(
                "\n".join(f"  {info.path} {info.dims}{whose}: {line}" for line in lines)
            ) from None
        splitting = [f"{n}:{'+'.join(a)}" for n in names.names if (a := self.rules.axes(n))]
        reason = ", ".join([rule] * bool(rule) + splitting) or "no rule for its dims: replicated"
        placed = _padded(info, names.layout(self.rules).on(self.mesh), reason)
        return placed._replace(names=names)

    def _following(self, info: ParamInfo, kernel: Follows) -> Placed:
        """Where a variable lies as its kernel does, whole along dims that do not divide."""
        whole = replace(
            info, dims=kernel.dims, spellings=kernel.spellings, asked=kernel.asked, follows=None
        )
        placed = self._place_one(whole)
        layout = placed.layout
        if layout.rank != len(kernel.dims):  # a fault of the layout, which is listed for the kernel
            replicated = Layout.replicated(self.mesh, len(info.dims))
            return placed if kernel.path == info.path else Placed(info, replicated, placed.reason)
        specs = [UNSHARDED if dim is None else layout.specs[dim] for dim in kernel.along]
        layout = Layout(specs, self.mesh).fitting(info.dims)
        whose = "packed" if kernel.path == info.path else f"as {kernel.path}"
        return Placed(info, layout, f"{placed.reason}, {whose}")

    def _slot(self, info: ParamInfo, owners: Mapping[str, Placed]) -> Placed:
        owner = owners.get(info.owner or "")
        if owner is not None and owner.info.dims == info.dims:
            slot = Placed(info, owner.layout, f"slot of {owner.info.path}", owner.names)
        elif info.asked is not None:
            return Placed(info, info.asked.on(self.mesh), "slot: a row for each device")
        elif info.names is not None and self.rules is not None:
            slot = self._by_names(info, info.names)  # a part of its parameter, such as its rows
        else:
            return Placed(info, Layout.replicated(self.mesh, len(info.dims)), "slot: replicated")
        return self._shared_out(slot) if self.zero else slot

    def _shared_out(self, placed: Placed) -> Placed:
        """What ZeRO makes of a parameter or a slot; the reason says so either way."""
        if placed.info.role not in ("parameter", "slot"):
            return placed
        layout = share_out(placed.layout, placed.stored_dims, self.batch_axes)
        says = f"zero={self.zero}" + ("" if layout else ": small, or no dim divides")
        return placed._replace(layout=layout or placed.layout, reason=f"{placed.reason}, {says}")

    def _asked(self, info: ParamInfo, entry: PathLayout | None) -> Layout:
        """The layer's own layout. It beats a pattern; one that is this very path contradicts it."""
        assert info.asked is not None
        if entry is not None and names_exactly(entry.pattern, info.spellings):
            asked = self.layout(entry.layout).unbound()
            if asked != info.asked.unbound():
                raise LayoutError(
                    f"the variable is laid out twice: layout {entry.pattern!r} names this very "
                    f"path and gives {asked}. Keep one of the two."
                )
        if MATCH in info.asked.specs:
            raise LayoutError(_MATCHES_NOTHING)
        return info.asked.on(self.mesh)

    # Inputs, targets, activations

    def input_layout(self, name: str | None, position: int, dims: Sequence[int]) -> Layout:
        """The layout of one input, by its name or else its position.

        Raises :class:`BatchError` if the dims do not divide.
        """
        return self._data_layout(self.inputs, "input", name, position, dims)

    def target_layout(self, name: str | None, position: int, dims: Sequence[int]) -> Layout:
        """The layout of one target (or of its sample weights), as :meth:`input_layout`."""
        return self._data_layout(self.targets, "target", name, position, dims)

    def check_data_keys(
        self, kind: Literal["input", "target"], names: Sequence[str | None]
    ) -> None:
        """Raise :class:`LayoutError` if ``inputs`` or ``targets`` name an unknown one.

        ``names`` are those of the arrays in order; names are not checked where some are unknown,
        nor with ``strict=False``.
        """
        keys = [key for key, _ in (self.inputs if kind == "input" else self.targets)]
        idle = [
            key
            for key in keys
            if (key not in names if isinstance(key, str) else not 0 <= key < len(names))
            and not (isinstance(key, str) and None in names)
        ]
        if idle and names and self.strict:
            plural = f"{len(names)} {kind}s" if len(names) > 1 else f"1 {kind}"
            named = [repr(name) for name in names if name is not None]
            has = f"{plural}: {', '.join(named)}" if named else f"{plural}, which have no names"
            raise LayoutError(
                f"{kind}s= lays out {', '.join(map(repr, idle))}, but the batch has {has}. Use "
                f"these names or the positions 0 to {len(names) - 1}."
            )

    def activation_layout(self, spellings: Iterable[str]) -> Layout | None:
        """The layout of the output of the layer that has these paths, if a pattern matches it."""
        entry = find_layout(self.activations, spellings)
        return None if entry is None else self.layout(entry.layout).on(self.mesh)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that the rows of a batch lie along."""
        return as_axes(self.batch)

    @property
    def batch_shards(self) -> int:
        """Into how many pieces the batch is cut."""
        return math.prod(self.mesh[axis] for axis in self.batch_axes)

    def _data_layout(
        self,
        named: tuple[tuple[str | int, Given], ...],
        kind: str,
        name: str | None,
        position: int,
        dims: Sequence[int],
    ) -> Layout:
        layouts = dict(named)
        asked = layouts.get(name) if name is not None else None
        asked = asked or layouts.get(position) or self._by_batch(len(dims))
        layout = self.layout(asked).on(self.mesh)
        # A target of lower rank than its layout keeps the dims that it has (labels beside images,
        # sample weights); an input of lower rank is not the one that the layout was written for.
        if layout.rank < len(dims) or (kind == "input" and layout.rank > len(dims)):
            raise BatchError(
                f"{kind} {name or position!r} has {len(dims)} dims {tuple(dims)}, but its layout "
                f"{layout.unbound()} has {layout.rank}: write one entry per dim."
            )
        layout = Layout(layout.specs[: len(dims)], self.mesh)
        if layout.rank and dims[0] % layout.num_shards(0):
            raise BatchError(_batch_fault(dims[0], layout))
        faults = layout.faults(dims, f"{kind} {name or position!r}")
        if faults:
            raise BatchError("\n".join(faults))
        return layout

    def _by_batch(self, rank: int) -> Layout:
        first: list[Spec] = [as_axes(self.batch) or UNSHARDED] if rank else []
        return Layout([*first, *[UNSHARDED] * (rank - 1)])

    def _binding_faults(self, what: str, layout: Given) -> list[str]:
        try:
            self.layout(layout).on(self.mesh)
        except LayoutError as error:
            return [f"{what}: {error}"]
        return []


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


def _batch_fault(rows: int, layout: Layout) -> str:
    shards = layout.num_shards(0)
    axes = " x ".join(f"axis {a!r} (size {layout.bound_mesh()[a]})" for a in layout.dim_axes(0))
    below, above = rows // shards * shards, -(-rows // shards) * shards
    nearest = f"{below} and {above}" if below else f"{above}"
    return f"a batch of {rows} does not divide over {axes}. The nearest sizes that do: {nearest}."
