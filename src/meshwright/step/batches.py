"""How the arrays of a batch lie, which takes no devices to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ..errors import BatchError
from ..layouts.dim_names import DimNames
from ..layouts.layout import Layout
from ..layouts.layout_map import Given
from ..layouts.placement import Placement
from ..program import Batch, Label, label_inputs
from .padding import Padded


@dataclass(frozen=True)
class BatchLayouts:
    """The layouts of batches; ``label`` says which part each array is, in the order of leaves."""

    placement: Placement
    label: Callable[[Batch], list[Label]] = label_inputs

    def __call__(self, batch: Batch, last: bool = True) -> Batch:
        """The layout of every array of a batch, in place of the arrays.

        A ``last`` batch that does not divide has all its rows on every device. Raises
        :class:`~meshwright.BatchError` for another one.
        """
        if isinstance(batch, Padded):
            tree = jax.tree.structure(batch.arrays)
            layouts = [layout for _, layout in self.padded(batch.arrays)]
            return replace(batch, arrays=jax.tree.unflatten(tree, layouts))
        try:
            layouts = self._by(self.placement, batch)
        except BatchError:
            if not last:
                raise
            layouts = self._by(_whole_rows(self.placement), batch)
        return jax.tree.unflatten(jax.tree.structure(batch), layouts)

    def abstract(self, batch: Batch, last: bool = True) -> Batch:
        """Shapes, dtypes and shardings of a batch on the mesh, which may be one on the host.

        A step that was traced for them is not traced again for the batch itself. Raises
        :class:`~meshwright.BatchError` as a call does.
        """

        def array(value: Any, layout: Layout) -> Any:
            return jax.ShapeDtypeStruct(value.shape, device_dtype(value), sharding=layout.sharding)

        return jax.tree.map(array, batch, self(batch, last))

    def padded(self, batch: Batch, inputs_only: bool = True) -> list[tuple[bool, Layout]]:
        """Of each array of a padded batch, whether it has more rows, and how it lies."""
        spread, whole = self.for_any_rows(batch), self._by(_whole_rows(self.placement), batch)
        grows = [not inputs_only or label.kind == "input" for label in self.label(batch)]
        return [(g, a if g else b) for g, a, b in zip(grows, spread, whole, strict=True)]

    def for_any_rows(self, batch: Batch) -> list[Layout]:
        """The layouts of a batch like this one whose rows divide."""
        rows = self.placement.mesh.size

        def like(value: Any) -> Any:
            shape = (rows, *value.shape[1:]) if value.shape else ()
            return jax.ShapeDtypeStruct(shape, "float32")

        return self._by(self.placement, jax.tree.map(like, batch))

    def of_inputs(self, batch: Batch) -> list[Layout]:
        """The same of its inputs alone."""
        pairs = zip(self.label(batch), self.for_any_rows(batch), strict=True)
        return [layout for label, layout in pairs if label.kind == "input"]

    def _by(self, placement: Placement, batch: Batch) -> list[Layout]:
        layout_of = {"input": placement.input_layout, "target": placement.target_layout}
        labels = self.label(batch)
        for kind in ("input", "target"):
            # Sample weights have the positions of their targets.
            names = {label.position: label.name for label in labels if label.kind == kind}
            placement.check_data_keys(kind, list(names.values()))
        return [
            layout_of[label.kind](label.name, label.position, value.shape)
            for label, value in zip(labels, jax.tree.leaves(batch), strict=True)
        ]


def check_sizes(batch: Batch) -> None:
    """Raise :class:`~meshwright.BatchError` for shapes without a size, as of ``keras.Input``."""
    for value in jax.tree.leaves(batch):
        if None in getattr(value, "shape", ()):
            raise BatchError(
                f"an array of the batch has shape {tuple(value.shape)}: expected the size of every "
                "dim, the rows of the batch too."
            )


def is_key(value: Any) -> bool:
    """Whether a value is one of JAX's typed random keys, or several: NumPy has no dtype for them.

    >>> import jax
    >>> is_key(jax.random.key(0)), is_key(jax.random.PRNGKey(0))
    (True, False)
    """
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def device_dtype(value: Any) -> Any:
    """The dtype that a host value has on devices."""
    dtype = getattr(value, "dtype", None)
    if is_key(value):
        return dtype  # JAX's own, which has no narrower one
    return jax.dtypes.canonicalize_dtype(np.asarray(value).dtype if dtype is None else dtype)


def _whole_rows(placement: Placement) -> Placement:
    """The same placement with the first dim of every input and target whole."""

    def whole(layouts: tuple[tuple[str | int, Given], ...]) -> Any:
        return tuple((key, _whole_first(layout)) for key, layout in layouts)

    return replace(
        placement,
        batch=None,
        inputs=whole(placement.inputs),
        targets=whole(placement.targets),
        zero=0,  # of variables, and it needs axes of the batch
    )


def _whole_first(layout: Given) -> Given:
    return layout.whole(0) if isinstance(layout, DimNames) else Layout([None, *layout.specs[1:]])
