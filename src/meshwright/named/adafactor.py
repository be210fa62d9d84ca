"""Adafactor over trees of named arrays: second moments kept as a row and a column of each matrix.

A slot has the names of its parameter's remaining dims, so the rules that split a parameter split
its slots with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import DimError, ModelError
from ..layouts.dim_rules import Dim, Dims, text_of
from .array import NamedArray
from .elementwise import cast, maximum, rsqrt, sqrt, square
from .operation import is_named, operation
from .reductions import reduce_mean

Tree = Any  # a tree of named arrays


class Transformation(NamedTuple):
    """A pair of functions, as in Optax: ``init(params)`` and ``update(grads, state, params)``."""

    init: Callable[..., Any]
    update: Callable[..., Any]


class AdafactorState(NamedTuple):
    """What Adafactor keeps: a count of steps, and trees like that of the parameters.

    A parameter has ``rows`` and ``columns`` if it is factored and ``whole`` if not; where a tree
    has nothing for it stands ``None``. All slots are float32.

    >>> from meshwright.named import named
    >>> state = adafactor(momentum=0.9).init({"bias": named(jnp.ones([3]), "hidden:3")})
    >>> state.rows["bias"], state.whole["bias"].shape, state.momentum["bias"].shape
    (None, {'hidden': 3}, {'hidden': 3})
    """

    count: Any  # shape=(), dtype=int32
    rows: Tree
    columns: Tree
    whole: Tree
    momentum: Tree


def adafactor(
    learning_rate: float | Callable[[Any], Any] | None = None,
    *,
    min_dim: int = 128,
    stacked: str | Iterable[str] = (),
    decay: float = 0.8,
    clip: float | None = 1.0,
    scale_by_parameter: bool = True,
    momentum: float | None = None,
    weight_decay: float | None = None,
    epsilon: float = 1e-30,
    least_scale: float = 1e-3,
) -> Transformation:
    """Adafactor (Shazeer and Stern 2018), for ``mw.named_program`` or a loop of your own.

    - ``learning_rate``: a number, or a function of the steps done so far, as a schedule of Optax;
      none is the paper's relative step ``min(0.01, 1 / sqrt(step))``.
    - ``min_dim``: second moments are factored over the two largest dims of a parameter where both
      have at least this size (of equal dims, over the later ones).
    - ``stacked``: names of dims along which separate parameters lie, such as layers. They are never
      factored, and each parameter of the stack is clipped and scaled by itself.
    - ``decay``: at step ``t`` a second moment keeps ``1 - t ** -decay`` of itself.
    - ``clip``: the root mean square that no update exceeds, before it is scaled.
    - ``scale_by_parameter``: steps are relative to the parameter's root mean square, or to
      ``least_scale`` if that is larger.
    - ``momentum``: the part of the last update that is kept, at the cost of one more slot.
    - ``weight_decay``: the part of itself that a parameter loses each step, whatever the rate.

    Raises :class:`ModelError` for an invalid choice, and, at ``init``, :class:`DimError` for a
    parameter without names and for a stacked dim that no parameter has.

    >>> from meshwright.named import named
    >>> state = adafactor(min_dim=2).init({"w": named(jnp.ones([4, 3]), "io:4 hidden:3")})
    >>> state.rows["w"].shape, state.columns["w"].shape, state.whole["w"]
    ({'hidden': 3}, {'io': 4}, None)
    """
    stacked = tuple(stacked.split()) if isinstance(stacked, str) else tuple(stacked)
    method = _Adafactor(
        learning_rate, min_dim, stacked, decay, clip, scale_by_parameter, momentum,
        weight_decay, epsilon, least_scale,
    )  # fmt: skip
    return Transformation(method.init, method.update)


class _Slots(NamedTuple):
    """The slots of one parameter."""

    rows: NamedArray | None
    columns: NamedArray | None
    whole: NamedArray | None
    momentum: NamedArray | None


@dataclass(frozen=True)
class _Adafactor:
    learning_rate: Any
    min_dim: int
    stacked: tuple[str, ...]
    decay: float
    clip: float | None
    scale_by_parameter: bool
    momentum: float | None
    weight_decay: float | None
    epsilon: float
    least_scale: float

    def __post_init__(self) -> None:
        faults = []
        if self.clip is not None and not self.clip > 0:
            faults.append(
                f"clip must be a root mean square above 0, or None; received {self.clip!r}."
            )
        if not self.decay > 0:
            faults.append(
                f"decay must be an exponent above 0 (0.8 in the paper); received {self.decay!r}."
            )
        if self.momentum is not None and not 0 <= self.momentum < 1:
            faults.append(
                f"momentum must be at least 0 and below 1, or None; received {self.momentum!r}."
            )
        if faults:
            raise ModelError("adafactor: " + "\n".join(faults))

    @property
    def init(self) -> Callable[..., AdafactorState]:
        @operation
        def adafactor_init(params: Tree) -> AdafactorState:
            leaves, tree = _leaves(params)
            self._check_stacked(leaves)
            slots = [self._empty(param) for param in leaves]
            return _state(jnp.zeros([], jnp.int32), slots, tree)

        return adafactor_init

    @property
    def update(self) -> Callable[..., tuple[Tree, AdafactorState]]:
        @operation
        def adafactor_update(
            grads: Tree, state: AdafactorState, params: Tree = None
        ) -> tuple[Tree, AdafactorState]:
            if params is None:
                raise ModelError(
                    "adafactor scales steps by the parameters: call update(grads, state, params)."
                )
            leaves, tree = _leaves(params)
            of_grads, tree_of_grads = _leaves(grads)
            if tree_of_grads != tree:
                raise ModelError(
                    f"adafactor: the gradients are of {_names_of(grads)} and the parameters "
                    f"{_names_of(params)}; both are one tree, as jax.grad makes it."
                )
            moved = [
                self._one(grad, param, slots, state.count)
                for grad, param, slots in zip(of_grads, leaves, _slots(state, tree), strict=True)
            ]
            updates = jax.tree.unflatten(tree, [update for update, _ in moved])
            return updates, _state(state.count + 1, [slots for _, slots in moved], tree)

        return adafactor_update

    def _check_stacked(self, params: list[NamedArray]) -> None:
        have = {dim.name for param in params for dim in param.dims}
        if missing := [name for name in self.stacked if name not in have]:
            raise DimError(
                f"stacked={' '.join(missing)!r}: no parameter has that dim. Parameters have "
                f"{', '.join(sorted(have)) or 'no dims'}."
            )

    def _factored(self, dims: Dims) -> tuple[Dim, Dim] | None:
        """The largest dim and the next, if both are large enough."""
        free = sorted((d for d in dims if d.name not in self.stacked), key=lambda d: d.size)
        if len(free) < 2 or free[-2].size < self.min_dim:
            return None
        return free[-1], free[-2]

    def _empty(self, param: NamedArray) -> _Slots:
        pair = self._factored(param.dims)
        momentum = None if self.momentum is None else _zeros(param.dims)
        if pair is None:
            return _Slots(None, None, _zeros(param.dims), momentum)
        first, second = (tuple(d for d in param.dims if d != dim) for dim in pair)
        return _Slots(_zeros(first), _zeros(second), None, momentum)

    def _one(
        self, grad: NamedArray, param: NamedArray, slots: _Slots, count: Any
    ) -> tuple[NamedArray, _Slots]:
        """One parameter's change and its new slots."""
        if grad.dims != param.dims:
            raise DimError(
                f"a gradient has dims [{text_of(grad.dims)}] and its parameter "
                f"[{text_of(param.dims)}]; they are the same where jax.grad makes it."
            )
        if _kinds(slots) != _kinds(self._empty(param)):
            raise ModelError(
                f"adafactor: the state of a parameter [{text_of(param.dims)}] has "
                f"{_kinds(slots)}, and with these options {_kinds(self._empty(param))}. Give "
                "min_dim=, stacked= and momentum= as where it was made, or begin with init."
            )
        value, grad = cast(param, jnp.float32), cast(grad, jnp.float32)
        update, slots = self._divided(grad, slots, count)
        if self.clip is not None:
            update = update / maximum(1.0, self._rms(update) / self.clip)
        update = update * self._rate(count)
        if self.scale_by_parameter:
            update = update * maximum(self._rms(value), self.least_scale)
        if self.momentum is not None and slots.momentum is not None:
            update = self.momentum * slots.momentum + (1 - self.momentum) * update
            slots = slots._replace(momentum=update)
        if self.weight_decay is not None:
            update = update + self.weight_decay * value
        return cast(-update, param.dtype), slots

    def _divided(self, grad: NamedArray, slots: _Slots, count: Any) -> tuple[NamedArray, _Slots]:
        """The gradient over the root of its second moment, and that moment."""
        decay = 1 - (count + 1).astype(jnp.float32) ** -self.decay
        moment = square(grad) + self.epsilon
        pair = self._factored(grad.dims)
        if pair is None:
            whole = decay * slots.whole + (1 - decay) * moment
            return grad * rsqrt(whole), slots._replace(whole=whole)
        largest, next_one = pair
        rows = decay * slots.rows + (1 - decay) * reduce_mean(moment, largest)
        columns = decay * slots.columns + (1 - decay) * reduce_mean(moment, next_one)
        # The moment is rows * columns / mean(rows); two roots keep it from underflowing.
        update = grad * rsqrt(rows / reduce_mean(rows, next_one)) * rsqrt(columns)
        return update, slots._replace(rows=rows, columns=columns)

    def _rate(self, count: Any) -> Any:
        if self.learning_rate is None:
            return jnp.minimum(1e-2, jax.lax.rsqrt((count + 1).astype(jnp.float32)))
        return self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate

    def _rms(self, x: NamedArray) -> NamedArray:
        """The root mean square of each parameter of a stack."""
        return sqrt(reduce_mean(square(x), [d for d in x.dims if d.name not in self.stacked]))


def _kinds(slots: _Slots) -> str:
    """The slots that there are, and their dims."""
    there = ((kind, x) for kind, x in slots._asdict().items() if x is not None)
    return ", ".join(f"{kind} [{text_of(x.dims)}]" for kind, x in there)


def _names_of(tree: Tree) -> str:
    with_paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    return ", ".join(jax.tree_util.keystr(path) for path, _ in with_paths) or "no arrays"


def _zeros(dims: Dims) -> NamedArray:
    return NamedArray(jnp.zeros([dim.size for dim in dims], jnp.float32), dims)


def _leaves(params: Tree) -> tuple[list[NamedArray], Any]:
    with_paths, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_named)
    bare = [jax.tree_util.keystr(path) for path, leaf in with_paths if not is_named(leaf)]
    if bare:
        raise DimError(
            f"adafactor takes named arrays; these parameters have no names for their dims: "
            f"{', '.join(bare)}. Give them: named(array, 'io:16 hidden:32')."
        )
    return [leaf for _, leaf in with_paths], tree


def _state(count: Any, slots: list[_Slots], tree: Any) -> AdafactorState:
    kinds = ([getattr(slot, kind) for slot in slots] for kind in _Slots._fields)
    return AdafactorState(count, *(jax.tree.unflatten(tree, kind) for kind in kinds))


def _slots(state: AdafactorState, tree: Any) -> list[_Slots]:
    kinds = (tree.flatten_up_to(kind) for kind in state[1:])
    return [_Slots(*slots) for slots in zip(*kinds, strict=True)]
