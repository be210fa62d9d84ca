"""What makes a case impossible on meshes, all of it at once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import MeshwrightError, MeshwrightWarning
from ..layouts.mesh import Mesh
from ..layouts.params import ParamInfo
from ..layouts.placement import Placement
from ..layouts.strict import refuse_idle_layouts
from ..program import Program
from ..step.batches import BatchLayouts
from ..together import Faults
from .cases import Case, Setup


def check_patterns(case: Case, mesh: Mesh) -> None:
    """Raise :class:`~meshwright.PlacementError` if patterns match nothing, whatever their axes."""
    patterns = dict.fromkeys(case.layouts or {}, ())
    strict = case.options.get("strict", True)
    placement = Placement.of(mesh.abstract(), patterns, batch=None, strict=strict)
    if infos := _infos(case):
        refuse_idle_layouts(placement, infos, repr(case.model.name))


def check_setup(case: Case, setup: Setup, placement: Placement) -> None:
    """Raise for layouts and rows that do not fit the mesh of a setup, without its devices."""
    faults = Faults()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeshwrightWarning)
        with faults:
            placement.place(_infos(case))
        if isinstance(case.model, Program):  # rows of Keras models are padded
            with faults:
                BatchLayouts(placement)(_part(case.batches[0], setup), last=False)
    faults.refuse()


@contextlib.contextmanager
def under(mesh: Mesh) -> Iterator[None]:
    """An error says under which mesh it happened."""
    try:
        yield
    except MeshwrightError as error:
        error.add_note(f"This happened under the mesh {mesh.axes_text}.")
        raise


def _infos(case: Case) -> Sequence[ParamInfo]:
    from ..frontends.keras.paths import model_infos

    if isinstance(case.model, Program):
        return case.model.infos
    return tuple(model_infos(case.model).values())


def _part(batch: Any, setup: Setup) -> Any:
    """The rows that are taken at once."""
    import jax

    parts = setup.options.get("accumulate", 1)
    return jax.tree.map(lambda array: array[: len(array) // parts] if array.ndim else array, batch)
