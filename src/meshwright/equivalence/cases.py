"""What is checked: a model with its data and its rules, as ``build`` returns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import BatchError, LayoutError, ModelError
from ..layouts.dim_rules import DimRules
from ..layouts.layout import Layout
from ..layouts.layout_map import Given, LayoutMap, as_given
from ..layouts.mesh import Mesh
from ..layouts.placement_arguments import as_axes, on_axes_of

Build = Callable[[], Any]

_WHAT_BUILD_RETURNS = (
    "build() must return (model, batch), (model, batch, layouts) or a meshwright.testing.Case; the "
    "model is a compiled Keras model or a Program, the batch is (x, y) or what the loss takes"
)


@dataclass(frozen=True, eq=False)
class Case:
    """A model, what it is trained on, and the layouts that it has on every mesh.

    ``model`` is a compiled Keras model or a :class:`~meshwright.Program`. ``batch`` is one batch,
    ``(x, y)`` or ``(x, y, sample_weight)`` of arrays for Keras, that every step takes; a list of
    batches is taken in turn. ``layouts`` maps path patterns to layouts; ``options`` are further
    arguments of :class:`~meshwright.Sharded`, such as ``{"inputs": ["batch", "rows"]}``.

    >>> Case("a model", ([1.0], [2.0]), {"kernel": [None, "model"]}).batches
    (([1.0], [2.0]),)
    """

    model: Any
    batch: Any
    layouts: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batches(self) -> tuple[Any, ...]:
        """The batches that the steps take in turn."""
        return tuple(self.batch) if isinstance(self.batch, list) else (self.batch,)


def case_of(
    built: Any, layouts: Any, options: Mapping[str, Any], *, needs_batch: bool = True
) -> Case:
    """The case that ``build()`` has returned; further layouts come first, options win.

    Without ``needs_batch`` the model alone will do. Raises :class:`ModelError` and
    :class:`BatchError` for what cannot be trained.
    """
    if isinstance(built, tuple) and len(built) in (2, 3):
        built = Case(*built)
    if not isinstance(built, Case) and not needs_batch:
        built = Case(built, None)
    if not isinstance(built, Case):
        raise ModelError(f"build() returned {_in_short(built)}; {_WHAT_BUILD_RETURNS}.")
    if needs_batch and (built.batch is None or not built.batches):
        raise BatchError(f"build() returned no batch; {_WHAT_BUILD_RETURNS}.")
    if strange := _no_array(built.batch):
        raise BatchError(
            f"build() returned a batch that holds a {strange}, not arrays alone; "
            f"{_WHAT_BUILD_RETURNS}. Of a dataset return one batch, next(iter(dataset))."
        )
    combined = LayoutMap(layouts=layouts or {})
    for pattern, layout in LayoutMap(layouts=built.layouts or {}).items():
        combined.setdefault(pattern, layout)
    return replace(built, layouts=dict(combined), options={**built.options, **options})


def _no_array(batch: Any) -> str | None:
    """What of a batch is neither an array nor the shape of one, nor a plain value."""
    import jax

    plain = bool | int | float | complex | str | bytes
    for leaf in jax.tree.leaves(batch, is_leaf=lambda node: isinstance(node, Iterator)):
        if not (hasattr(leaf, "dtype") or hasattr(leaf, "__array__") or isinstance(leaf, plain)):
            return type(leaf).__name__
    return None


def _in_short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"


@dataclass(frozen=True)
class Setup:
    """The arguments of a strategy on one mesh, and what there is to say about them."""

    mesh: Mesh
    layouts: Mapping[str, Given]
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def setups(case: Case, meshes: Sequence[Mesh]) -> list[Setup]:
    """The same layouts and rules on each mesh; an axis that a mesh lacks splits nothing there.

    Raises :class:`LayoutError` for axes that none of the meshes has.
    """
    axis_names = {axis for mesh in meshes for axis in mesh.axis_names}
    batch = _batch(case)
    layouts = _layouts(case)
    axes_of_arguments = _axes_of_arguments(case)
    unknown = {
        what: [a for a in axes if a not in axis_names] for what, axes in axes_of_arguments.items()
    }
    if any(unknown.values()):
        raise LayoutError(_unknown_axes(unknown, case, meshes))
    return [_setup(case, layouts, batch, mesh, axes_of_arguments) for mesh in meshes]


def axes_named(case: Case) -> tuple[str, ...]:
    """Every axis that the layouts and rules of a case name."""
    return tuple(dict.fromkeys(axis for axes in _axes_of_arguments(case).values() for axis in axes))


def _batch(case: Case) -> Any:
    return case.options.get("batch", "batch" if _dim_rules(case) is None else None)


def _layouts(case: Case) -> dict[str, Given]:
    return {pattern: as_given(layout) for pattern, layout in (case.layouts or {}).items()}


def _axes_of_arguments(case: Case) -> Mapping[str, Iterable[str]]:
    """The axes that are named, by who names them."""
    ruled = _dim_rules(case)
    axes_of = {
        f"layout {pattern!r}": _axes_of(layout) for pattern, layout in _layouts(case).items()
    }
    axes_of["batch="] = as_axes(_batch(case))
    pairs = ruled.pairs if ruled else ()
    axes_of |= {f"rule '{dim}:{axes}'": DimRules([(dim, axes)]).axes(dim) for dim, axes in pairs}
    for name in _MAPPED:
        axes_of |= {
            f"{name} {k!r}": _axes_of(v) for k, v in _mapped(case.options.get(name)).items()
        }
    return axes_of


def _unknown_axes(unknown: Mapping[str, list[str]], case: Case, meshes: Sequence[Mesh]) -> str:
    names = {"batch=": f"batch={case.options.get('batch', 'batch')!r}"}
    names["batch="] += "" if "batch" in case.options else " (the default)"
    faults = [
        f"  {names.get(what, what)} names axis {axis!r}"
        for what, axes in unknown.items()
        for axis in axes
    ]
    one = len(faults) == 1
    choices = " or ".join(mesh.axes_text for mesh in meshes)
    way_out = f"Rename {'it' if one else 'them'}, or add the axis to a mesh, if only with size 1."
    if unknown["batch="]:
        axis = meshes[0].axis_names[0]
        way_out += (
            f" The rows of the batch go along an axis by batch={axis!r} (--option batch={axis} on "
            "the command line); batch=None gives all rows to every device."
        )
    head = f"{len(faults)} axis name{' is' if one else 's are'} unknown to the mesh {choices}"
    return "\n".join([f"{head}:", *faults, way_out])


_MAPPED = ("inputs", "targets", "activations")


def _setup(
    case: Case,
    layouts: Mapping[str, Given],
    batch: Any,
    mesh: Mesh,
    axes_of_arguments: Mapping[str, Iterable[str]],
) -> Setup:
    options = dict(case.options)
    for name in _MAPPED:
        if options.get(name) is not None:
            options[name] = {k: on_axes_of(mesh, v) for k, v in _mapped(options[name]).items()}
    if (ruled := _dim_rules(case)) is not None:
        options["rules"] = ruled.on(mesh)
    if ruled is None or "batch" in options:
        options["batch"] = tuple(axis for axis in as_axes(batch) if axis in mesh) or None
    absent = dict.fromkeys(a for axes in axes_of_arguments.values() for a in axes if a not in mesh)
    notes = [
        f"the mesh has no axis {axis!r}; dims laid out on it are not split here" for axis in absent
    ]
    rules = {pattern: on_axes_of(mesh, layout) for pattern, layout in layouts.items()}
    return Setup(mesh, rules, options, tuple(notes))


def _dim_rules(case: Case) -> DimRules | None:
    rules = case.options.get("rules")
    return None if rules is None else DimRules(rules)


def _axes_of(layout: Given) -> tuple[str, ...]:
    """The axes that a layout names itself."""
    return layout.axes if isinstance(layout, Layout) else ()


def _mapped(layouts: Any) -> dict[Any, Given]:
    """``inputs=`` or ``targets=``: a mapping, or one layout for the only array."""
    if layouts is None:
        return {}
    by_position = layouts if isinstance(layouts, Mapping) else {0: layouts}
    return {key: as_given(layout) for key, layout in by_position.items()}
