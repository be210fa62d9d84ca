"""Right gradients where images, sequences or features are split: a guard against XLA's partitioner.

XLA (with Shardy, JAX's default) computes some windowed operations silently wrong, by factors:

- the kernel's gradient of a convolution whose rows are split, or which is grouped and whose batch
  is split, on a mesh with an axis that splits none of its dims (it is counted once per copy);
- a convolution whose rows are split and whose kernel is split over its features;
- the gradient of max pooling with overlapping windows over split rows;
- gradients where a split dim does not divide: convolution, pooling, repeating, resizing.

On CPUs it cannot run a Fourier transform along a dim that is split.

:func:`guard` follows on the traced function which axes can reach which dims (``reach.py``). A
convolution or pooling that they reach gets its halo exchange written out (``halo.py``). A dim
that an operation makes or meets and that does not divide is held whole there, by
``with_sharding_constraint``, and the other dims are left to XLA. All else stays as it was. This
happens before differentiation; the layout of a value is then also the layout of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from .. import _compat
from ..errors import LayoutError
from ..jaxprs import lines, reach
from ..jaxprs.edits import constraint_on, traced
from ..jaxprs.link_rows import conv_places
from ..jaxprs.primitives import (
    CALLS,
    CONTROL_FLOW,
    POOLING,
    inner_jaxprs,
    is_pointwise,
    opened,
)
from ..jaxprs.reach import Cut, Cuts, Dim, Dims, Scope, feeble_cuts, pieces, sure_cuts
from ..layouts.layout import Layout
from ..layouts.mesh import Mesh
from ..program import Arrays, Aux, Batch, Logs, Program, Step, TrainState
from . import halo as windows

Layouts = Any  # per argument, a pytree prefix of Layout or None, as jit's in_shardings
Specs = dict[tuple[bool, int], dict[int, None]]  # (is a result, which): the dims to be whole


@dataclass(frozen=True)
class Uneven:
    """One operation at which a dim is held whole, though axes would split it.

    ``where`` is the path of name scopes (layers), ``dim`` the dim of the result (of an operand
    where the results have no such dim), ``sizes`` are those that do not divide into ``pieces`` over
    ``axes``; none where they do, but the operation
    needs them whole: windows reach further than a halo can, or elements are taken at strides.
    """

    primitive: str
    where: str
    dim: int
    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    pieces: int

    def __str__(self) -> str:
        place = f"{self.where}/{self.primitive}" if self.where else self.primitive
        axes = ", ".join(map(repr, self.axes))
        fact = (
            f"dim {self.dim} (size {', '.join(map(str, self.sizes))}) does not divide over {axes}"
            if self.sizes
            else f"along dim {self.dim}, it cannot be split over {axes}"
        )
        return f"{place}: {fact} ({self.pieces} pieces), so it is held whole there."


def guard(function: Callable[..., Any], layouts: Layouts) -> Callable[..., Any]:
    """The same function, with right gradients however its arguments are split.

    ``layouts`` says how the arguments lie: for each positional argument a :class:`Layout` for all
    its arrays, a pytree of them, or ``None`` for arrays that are whole; the last arguments and the
    keywords may be left out. Arguments and results are pytrees of arrays. Apply it to what will be
    differentiated, not to the gradient, and run the result under ``jit``. What is closed over
    counts as whole. Raises :class:`LayoutError` for layouts on several meshes, or on none.

    >>> import jax, jax.numpy as jnp
    >>> import meshwright as mw
    >>> mesh = mw.create_mesh({"rows": 8})
    >>> images = mw.Layout([None, "rows", None, None], mesh)
    >>> def loss(kernel, x):
    ...     y = jax.lax.conv(x.transpose(0, 3, 1, 2), kernel, (2, 2), "SAME")  # 8 rows become 4
    ...     return jnp.sum(jnp.tanh(y))
    >>> kernel, x = jnp.ones((4, 1, 3, 3)), jax.device_put(jnp.ones((2, 8, 8, 1)), images.sharding)
    >>> gradient = jax.jit(jax.grad(guard(loss, (None, images))))(kernel, x)
    >>> print(uneven_ops(loss, (None, images), kernel, x)[0])
    conv_general_dilated: dim 2 (size 4) does not divide over 'rows' (8 pieces), so it is held ...
    """
    mesh = _mesh_of(layouts)

    def safe(*args: Any, **kwargs: Any) -> Any:
        closed, tree = traced(function, *args, **kwargs)
        closed = lines.noted(closed)
        edited = _Edit(mesh).closed(closed, _follow(closed, layouts, args, kwargs))
        run = jaxpr_as_fun(edited)
        if not _compat.is_staged():  # a constraint must be compiled with what it is within
            run = _compat.jit_inlined(run)
        return jax.tree.unflatten(tree, run(*jax.tree.leaves((args, kwargs))))

    return safe


def guarded(program: Program, layouts: TrainState, of_batch: Callable[[Batch], Any]) -> Program:
    """The program with right numbers for state and batches with these layouts.

    ``layouts`` holds a :class:`Layout` per array of the state, in the dims that the program has;
    ``of_batch`` gives those of a batch, which ``forward`` takes its inputs for.
    """
    weights = layouts.params, layouts.state

    def loss(params: Arrays, whole: TrainState, batch: Batch, training: bool) -> tuple[Any, Aux]:
        def of_arrays(params: Arrays, whole: TrainState, batch: Batch) -> tuple[Any, Aux]:
            return program.loss(params, whole, batch, training)

        lies = of_batch(batch)
        if is_safe((*weights, lies)):
            return program.loss(params, whole, batch, training)
        # A state may lack what a loss does not read.
        pairs = zip(layouts, whole, strict=True)
        here = TrainState(*({path: part[path] for path in values} for part, values in pairs))
        return guard(of_arrays, (layouts.params, here, lies))(params, whole, batch)

    def predicting(predict: Callable[..., Any]) -> Callable[..., Any]:
        def safe(params: Arrays, state: Arrays, batch: Batch, *modes: bool) -> Any:
            lies = (*weights, of_batch(batch))
            if is_safe(lies):
                return predict(params, state, batch, *modes)
            return guard(lambda *arrays: predict(*arrays, *modes), lies)(params, state, batch)

        return safe

    def stepping(own: Step) -> Step:
        def safe(whole: TrainState, batch: Batch) -> tuple[TrainState, Logs]:
            lies = of_batch(batch)
            if is_safe((*weights, lies)):
                return own(whole, batch)
            return guard(own, (layouts, lies))(whole, batch)

        return safe

    return replace(
        program,
        loss=loss,
        own_step=program.own_step and stepping(program.own_step),
        own_test_step=program.own_test_step and stepping(program.own_test_step),
        forward=predicting(program.forward),
        predict=program.predict and predicting(program.predict),
    )


def is_safe(layouts: tuple[Any, Any, Any]) -> bool:
    """Whether rows of the batch alone are split, over the whole mesh: that never went wrong.

    ``layouts`` are those of parameters, of other variables and of the batch.
    """
    params, state, batch = layouts
    if any(layout.axes for layout in jax.tree.leaves((params, state))):
        return False
    return all(
        not layout.axes
        or (layout.axes == layout.dim_axes(0) and layout.total_shards == layout.bound_mesh().size)
        for layout in jax.tree.leaves(batch)
    )


def uneven_ops(
    function: Callable[..., Any], layouts: Layouts, *args: Any, **kwargs: Any
) -> list[Uneven]:
    """What :func:`guard` holds whole in this call, and why; the arguments may be abstract."""
    edit = _Edit(_mesh_of(layouts))
    closed, _ = traced(function, *args, **kwargs)
    edit.closed(closed, _follow(closed, layouts, args, kwargs))
    return list(dict.fromkeys(edit.uneven))


# Layouts of the arguments


def _is_layout(node: Any) -> bool:
    return node is None or isinstance(node, Layout)


def _mesh_of(layouts: Layouts) -> Mesh:
    leaves = jax.tree.leaves(layouts, is_leaf=_is_layout)
    meshes = {leaf.bound_mesh() for leaf in leaves if leaf is not None}
    if len(meshes) != 1:
        raise LayoutError(
            f"the layouts of a function's arguments lie on one mesh; received {len(meshes)}: "
            f"{', '.join(sorted(map(str, meshes))) or 'no layout'}."
        )
    return meshes.pop()


def _follow(closed: Any, layouts: Layouts, args: Any, kwargs: Any) -> Scope:
    """Follow the cuts of the arguments' layouts through the traced function."""
    per_argument = (*layouts, *[None] * (len(args) - len(layouts)))
    spread = jax.tree.broadcast(per_argument, args, is_leaf=_is_layout)
    per_leaf = jax.tree.leaves(spread, is_leaf=_is_layout)
    per_leaf += [None] * len(jax.tree.leaves(kwargs))
    cuts = [
        _cuts(layout, len(v.aval.shape))
        for layout, v in zip(per_leaf, closed.jaxpr.invars, strict=True)
    ]
    return reach.follow(closed.jaxpr, cuts)


def _cuts(layout: Layout | None, rank: int) -> list[Cut]:
    if layout is None:
        return [()] * rank
    mesh = layout.bound_mesh()
    named = [layout.dim_axes(dim) for dim in range(layout.rank)]
    cuts = [tuple((axis, mesh[axis]) for axis in axes if mesh[axis] > 1) for axes in named]
    return [*cuts, *[()] * (rank - len(cuts))][:rank]


# The change of a jaxpr


class _Edit:
    """Changes a jaxpr, and those within it; notes what is held whole, and which axes matter."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.uneven: list[Uneven] = []
        self.axes: set[str] = set()  # that reach operations which had to be changed

    def closed(self, closed: Any, scope: Scope) -> Any:
        """The closed (or open) jaxpr, changed; itself where nothing is to be done."""
        before = opened(closed)
        eqns: list[Any] = []
        for index, eqn in enumerate(before.eqns):
            inner = scope.inner.get(index)
            eqns += self._eqn(eqn, scope) if inner is None else self._outer(eqn, scope, inner)
        if len(eqns) == len(before.eqns) and all(map(_is, eqns, before.eqns)):
            return closed
        after = before.replace(eqns=eqns)
        return after if closed is before else closed.replace(jaxpr=after)

    def _outer(self, eqn: Any, scope: Scope, inner: dict[str, list[Scope]]) -> list[Any]:
        """An equation that holds jaxprs."""
        within = _Edit(self.mesh)
        called = inner_jaxprs(eqn)
        edited = {
            key: [within.closed(j, s) for j, s in zip(called[key], inner[key], strict=True)]
            for key in called
        }
        self.uneven += within.uneven
        self.axes |= within.axes
        if all(all(map(_is, edited[key], called[key])) for key in called):
            return [eqn]
        if eqn.primitive.name not in CALLS | CONTROL_FLOW:
            return self._at_boundary(eqn, scope, within.axes)
        params = {key: tuple(new) if key == "branches" else new[0] for key, new in edited.items()}
        return [eqn.replace(params={**eqn.params, **params})]

    def _at_boundary(self, eqn: Any, scope: Scope, axes: set[str]) -> list[Any]:
        """Hold operands and results: a derivative given by hand would not see a change inside."""
        specs: Specs = {}
        for key, atom in _atoms(eqn):
            for dim, factors in enumerate(scope.of(atom)):
                if axes & _axes_of(sure_cuts(factors) | feeble_cuts(factors)):
                    specs.setdefault(key, {})[dim] = None
        return self._constrained(eqn, specs)

    def _eqn(self, eqn: Any, scope: Scope) -> list[Any]:
        name = eqn.primitive.name
        if name == "conv_general_dilated":
            return self._conv(eqn, scope)
        if name in POOLING:
            return self._pool(eqn, scope)
        if is_pointwise(eqn):
            return [eqn]
        return self._held_whole(eqn, scope, _apart(eqn))

    # Windows

    def _conv(self, eqn: Any, scope: Scope) -> list[Any]:
        numbers = eqn.params["dimension_numbers"]
        left, right = map(scope.of, eqn.invars)
        (out,) = map(scope.of, eqn.outvars)
        places = list(conv_places(numbers))
        rows = {*_reaching(left, [i for i, _, _ in places])}
        rows |= {*_reaching(right, [j for _, j, _ in places])}
        rows |= {*_reaching(out, [k for _, _, k in places])}
        groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
        batch = {*_reaching(left, numbers.lhs_spec[:2])} if groups > 1 else set()
        if not rows | batch:
            return self._held_whole(eqn, scope)
        self.axes |= rows | batch
        if eqn.params["batch_group_count"] > 1 or _reaching(right, [j for _, j, _ in places]):
            return self._whole(eqn)  # the gradient of a kernel, already differentiated
        claim = _Claims(self.mesh)
        by_batch = claim(left[numbers.lhs_spec[0]], eqn.invars[0].aval.shape[numbers.lhs_spec[0]])
        by_rows = [
            self._window(eqn, claim, left[i], window, (0, i), k)
            for (i, _, k), window in zip(places, windows.conv_windows(eqn), strict=True)
        ]
        features = eqn.params["feature_group_count"]
        if features == 1:
            features = eqn.invars[1].aval.shape[numbers.rhs_spec[0]]
        by_features = claim(right[numbers.rhs_spec[0]], features)
        if groups > 1 and not by_features:
            by_features = claim(left[numbers.lhs_spec[1]], features)
        return [windows.split_conv(eqn, self.mesh, by_batch, by_rows, by_features)]

    def _pool(self, eqn: Any, scope: Scope) -> list[Any]:
        dims = scope.of(eqn.invars[0])
        along = windows.pool_windows(eqn)
        rows = {*_reaching(dims, [i for i, window in enumerate(along) if not window.is_trivial])}
        if not rows:
            return self._held_whole(eqn, scope)
        self.axes |= rows
        claim = _Claims(self.mesh)
        entries = [
            self._window(eqn, claim, dim, window, (0, i), i)
            for i, (dim, window) in enumerate(zip(dims, along, strict=True))
        ]
        return [windows.split_pool(eqn, self.mesh, entries)]

    def _window(
        self,
        eqn: Any,
        claim: _Claims,
        dim: Dim,
        window: windows.Window,
        source: tuple[int, int],
        place: int,
    ) -> windows.Entry:
        """The axes that a windowed dim is split over; none, with a note, where that cannot be."""
        size = eqn.invars[source[0]].aval.shape[source[1]]
        results = eqn.outvars[0].aval.shape[place]
        for cut in sorted(sure_cuts(dim)):
            if windows.halo(window, size, results, pieces(cut)) is None:
                self._note(eqn, place, (size, results), cut)
                return ()
        return claim(dim, size)

    def _whole(self, eqn: Any) -> list[Any]:
        specs: Specs = {
            key: dict.fromkeys(range(len(atom.aval.shape))) for key, atom in _atoms(eqn)
        }
        return self._constrained(eqn, specs)

    # Other operations

    def _held_whole(self, eqn: Any, scope: Scope, apart: Sequence[int] = ()) -> list[Any]:
        """Hold dims that do not divide, each by itself, and those ``apart`` if axes reach them."""
        specs: Specs = {}
        for key, atom in _atoms(eqn):
            dims = scope.of(atom)
            for dim, factors in enumerate(dims):
                size = atom.aval.shape[dim]
                sure = sure_cuts(factors)
                bad = {
                    cut
                    for cut in sure | _unrivalled(dims, dim)
                    if dim in apart or size % pieces(cut)
                }
                if bad:
                    specs.setdefault(key, {})[dim] = None
                for cut in sorted(bad & sure):
                    self._note(eqn, dim, (size,), cut)
                self.axes |= _axes_of(bad)
        return self._constrained(eqn, specs)

    def _note(self, eqn: Any, dim: int, sizes: tuple[int, ...], cut: Cut) -> None:
        uneven = tuple(dict.fromkeys(size for size in sizes if size % pieces(cut)))
        if uneven != (1,):
            axes = tuple(axis for axis, _ in cut)
            where = _compat.name_scope(eqn)
            self.uneven.append(Uneven(eqn.primitive.name, where, dim, uneven, axes, pieces(cut)))

    def _constrained(self, eqn: Any, specs: Specs) -> list[Any]:
        """The equation between constraints on its operands and on its results."""
        before, after = [], []
        invars, outvars = list(eqn.invars), list(eqn.outvars)
        for (is_result, index), whole in specs.items():
            if is_result:
                constraint = self._constraint(outvars[index], whole, eqn)
                (new,) = constraint.outvars
                after.append(constraint.replace(invars=[new], outvars=[outvars[index]]))
                outvars[index] = new
            elif not isinstance(invars[index], Literal):
                constraint = self._constraint(invars[index], whole, eqn)
                before.append(constraint)
                (invars[index],) = constraint.outvars
        if not before and not after:
            return [eqn]
        return [*before, eqn.replace(invars=invars, outvars=outvars), *after]

    def _constraint(self, atom: Any, whole: dict[int, None], eqn: Any) -> Any:
        """An equation that holds dims of a value whole; its result is a variable of its own."""
        entries = [
            None if dim in whole else PartitionSpec.UNCONSTRAINED
            for dim in range(len(atom.aval.shape))
        ]
        return constraint_on(atom, self.mesh.jax_mesh, entries, eqn)


def _apart(eqn: Any) -> list[int]:
    """Dims along which XLA cannot be trusted with any split: strides, gaps, windows left over."""
    name, params = eqn.primitive.name, eqn.params
    if name == "fft":
        rank = len(eqn.invars[0].aval.shape)
        return list(range(rank - len(params["fft_lengths"]), rank))
    if name == "slice":
        return [i for i, stride in enumerate(params["strides"] or ()) if stride > 1]
    if name == "pad":
        return [i for i, (_, _, between) in enumerate(params["padding_config"]) if between]
    if name in ("reduce_window", "select_and_gather_add"):
        return [i for i, window in enumerate(windows.pool_windows(eqn)) if not window.is_trivial]
    if name in ("select_and_scatter", "select_and_scatter_add"):
        return [i for i, size in enumerate(params["window_dimensions"]) if size > 1]
    return []


class _Claims:
    """Gives each axis of the mesh to one dim of an operation."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.axes: set[str] = set()

    def __call__(self, dim: Dim, size: int) -> windows.Entry:
        """The axes that a dim is surely split over, if they are whole, free and divide the size."""
        cuts = sure_cuts(dim)
        (cut,) = cuts if len(cuts) == 1 else ((),)
        whole = all(self.mesh[axis] == number for axis, number in cut)
        if not whole or size % pieces(cut) or self.axes & _axes_of([cut]):
            return ()
        self.axes |= _axes_of([cut])
        return tuple(axis for axis, _ in cut)


def _atoms(eqn: Any) -> Iterator[tuple[tuple[bool, int], Any]]:
    """Operands and results of an equation that are arrays, with their places."""
    for is_result, atoms in ((False, eqn.invars), (True, eqn.outvars)):
        for index, atom in enumerate(atoms):
            if getattr(atom.aval, "shape", ()) and hasattr(atom.aval, "weak_type"):
                yield (is_result, index), atom


def _reaching(dims: Dims, places: Sequence[int]) -> set[str]:
    """The axes that may split some of these dims of a value."""
    return _axes_of([c for i in places for c in sure_cuts(dims[i]) | _unrivalled(dims, i)])


def _unrivalled(dims: Dims, dim: int) -> Cuts:
    """The feeble cuts of a dim whose axes surely cut no other dim of the value."""
    elsewhere = _axes_of([c for i, other in enumerate(dims) if i != dim for c in sure_cuts(other)])
    return frozenset(c for c in feeble_cuts(dims[dim]) if not elsewhere & _axes_of([c]))


def _axes_of(cuts: Any) -> set[str]:
    return {axis for cut in cuts for axis, _ in cut}


def _is(one: Any, other: Any) -> bool:
    return one is other
