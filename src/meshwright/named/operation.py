"""What every operation has in common: ``rules=``, and results that lie where the rules say."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import jax

from .array import NamedArray, as_named, lay_out, using
from .rules import inside_operation

_P = ParamSpec("_P")
_R = TypeVar("_R", covariant=True)


class Operation(Protocol[_P, _R]):
    """A function of its own parameters, or of these and ``rules=``."""

    @overload
    def __call__(self, *args: _P.args, **options: _P.kwargs) -> _R: ...
    @overload
    def __call__(self, *args: Any, rules: Any, **options: Any) -> _R: ...


def operation(function: Callable[_P, _R]) -> Operation[_P, _R]:
    """An operation of the language: it takes ``rules=``, and lays out what it returns.

    Operations that it is made of lay nothing out: what lies between is XLA's to choose.
    """
    what = f"result of {function.__name__.lstrip('_')}"
    names = named_parameters(function)

    @functools.wraps(function)
    def call(*args: Any, rules: Any = None, **options: Any) -> Any:
        if inside_operation.get():
            return function(*args, **options)
        if rules is not None:
            with using(rules):
                return call(*args, **options)
        args, options = with_names(names, args, options)
        token = inside_operation.set(True)
        try:
            result = function(*args, **options)
        finally:
            inside_operation.reset(token)
        return _settled(result, what)

    return call  # type: ignore[return-value]


def named_parameters(function: Callable[..., Any]) -> tuple[tuple[int, str, bool], ...]:
    """Parameters that are named arrays by their annotation: place, name, and whether one may be
    ``None``."""
    parameters = enumerate(inspect.signature(function).parameters.items())
    kinds = {"NamedArray": False, "NamedArray | None": True}
    return tuple(
        (place, name, kinds[parameter.annotation])
        for place, (name, parameter) in parameters
        if parameter.annotation in kinds and parameter.kind is not parameter.VAR_KEYWORD
    )


def with_names(
    names: tuple[tuple[int, str, bool], ...], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function, of which those of its :func:`named_parameters` are named.

    Raises :class:`DimError` for an array that has no names.
    """
    for place, name, may_lack in names:
        by_place = place < len(args)
        if not by_place and name not in options:
            continue
        x = args[place] if by_place else options[name]
        if isinstance(x, NamedArray) or (x is None and may_lack):
            continue
        if by_place:
            args = (*args[:place], as_named(x), *args[place + 1 :])
        else:
            options = {**options, name: as_named(x)}
    return args, options


def named_operation(call: Callable[..., Any], name: str, doc: str) -> Callable[..., Any]:
    """An operation that is made rather than written: with its name and its docstring."""
    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return operation(call)


def example(call: str, result: str) -> str:
    """The last part of a docstring: a call of ``mn``, and what it prints."""
    rounded = ".round(2)" if "." in result else ""
    return f"\n\n>>> import meshwright.named as mn\n>>> print({call}.array{rounded})\n{result}"


def callback(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that was given to an operation: what it is made of is laid out as outside."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        token = inside_operation.set(False)
        try:
            return function(*args, **options)
        finally:
            inside_operation.reset(token)

    return call


def is_named(x: Any) -> bool:
    """Whether a node of a pytree is a named array: the ``is_leaf`` of JAX's tree functions."""
    return isinstance(x, NamedArray)


def _settled(result: Any, what: str) -> Any:
    if isinstance(result, NamedArray):
        return lay_out(result, what)
    return jax.tree.map(lambda x: lay_out(x, what) if is_named(x) else x, result, is_leaf=is_named)
