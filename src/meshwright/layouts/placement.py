"""The placement: where every variable, slot, input and activation of a model lies.

A frozen value that knows no Keras and no device. It answers questions about
:class:`ParamInfo` descriptions; front ends ask them and act on the answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..errors import BatchError, LayoutError, MeshError
from .dim_names import DimNames
from .dim_rules import DimRules, RulesLike
from .layout import UNSHARDED, Layout, Spec
from .layout_map import Given, LayoutMap, PathLayout, find_layout
from .mesh import Mesh, way_from_jax
from .params import ParamInfo, Placed
from .placement_arguments import (
    MATCHES_NOTHING,
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
from .placing import place
from .zero import check_level

Unmatched = Literal["warn", "error", "replicate"]


_PADS_WEIGHTS = (
    "pad=True is for weights. Batches are padded by themselves, and activations that do not divide "
    "are kept whole; leave pad out."
)


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
    :meth:`of` makes one from friendlier arguments. Raises :class:`LayoutError` with every fault,
    and :class:`MeshError` where ``mesh`` is none.

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
                f"expected a mesh, such as mw.create_mesh({{'batch': 8}}); received {self.mesh!r}."
                f"{way_from_jax(self.mesh)}"
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
        faults = [f"{what}: {MATCHES_NOTHING}" for what, x in weights + arrays if holds_match(x)]
        faults += rules_faults(self.rules, self.mesh)
        for what, layout in weights:  # rules are checked later, with the variables' sizes
            if isinstance(layout, Layout) or self.rules is None:
                faults += self._binding_faults(what, layout)
        for what, layout in arrays + outputs:
            faults += self._binding_faults(what, layout)
        faults += [f"{what}: {_PADS_WEIGHTS}" for what, layout in arrays + outputs if layout.pad]
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

        def by_path(entries: tuple[PathLayout, ...]) -> tuple[PathLayout, ...]:
            return tuple(entry._replace(layout=on_axes_of(mesh, entry.layout)) for entry in entries)

        axes = tuple(axis for axis in self.batch_axes if axis in mesh)
        rules = self.rules
        if rules is not None:
            axes_by_dim = {dim: [a for a in rules.axes(dim) if a in mesh] for dim, _ in rules.pairs}
            rules = DimRules([(dim, "+".join(axes)) for dim, axes in axes_by_dim.items() if axes])
        return replace(
            self,
            mesh=mesh,
            layouts=by_path(self.layouts),
            batch=axes[0] if len(axes) == 1 else axes or None,
            inputs=tuple((key, on_axes_of(mesh, layout)) for key, layout in self.inputs),
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

    def layout(self, layout: Given) -> Layout:
        """An unbound layout as it is, or that of named dims by the rules.

        Raises :class:`LayoutError` for named dims without rules.
        """
        if isinstance(layout, Layout):
            return layout
        if self.rules is None:
            raise LayoutError(
                f"its dims are named [{layout}], but there are no rules from dims to axes: pass "
                "rules='batch:rows;d_ff:cols', or axes in place of the names."
            )
        return layout.layout(self.rules)

    def with_zero(self, zero: int) -> Placement:
        """The same placement at another level of ZeRO."""
        return replace(self, zero=zero)

    # Variables

    def place(self, infos: Iterable[ParamInfo]) -> list[Placed]:
        """The layout of each variable and why. A slot follows its owner, if that is in ``infos``.

        Raises one :class:`PlacementError` that lists every variable whose layout does not fit.
        """
        return place(self, infos)

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
        by_name = layouts.get(name) if name is not None else None
        unbound = by_name or layouts.get(position) or self._by_batch(len(dims))
        layout = self.layout(unbound).on(self.mesh)
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


def _batch_fault(rows: int, layout: Layout) -> str:
    shards = layout.num_shards(0)
    axes = " x ".join(f"axis {a!r} (size {layout.bound_mesh()[a]})" for a in layout.dim_axes(0))
    below, above = rows // shards * shards, -(-rows // shards) * shards
    nearest = f"{below} and {above}" if below else f"{above}"
    return f"a batch of {rows} does not divide over {axes}. The nearest sizes that do: {nearest}."
