"""What every operation has in common: ``rules=``, and results that lie where the rules say."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import jax

from .arguments import random_key
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
    checks = checks_of(function)

    @functools.wraps(function)
    def call(*args: Any, rules: Any = None, **options: Any) -> Any:
        if inside_operation.get():
            return function(*args, **options)
        if rules is not None:
            with using(rules):
                return call(*args, **options)
        args, options = checked(checks, args, options)
        token = inside_operation.set(True)
        try:
            result = function(*args, **options)
        finally:
            inside_operation.reset(token)
        return _settled(result, what)

    return call  # type: ignore[return-value]


Checks = tuple[tuple[int, str, Callable[[Any], Any]], ...]


def checks_of(function: Callable[..., Any]) -> Checks:
    """Parameters that are looked at before a function runs: place, name, and what checks each.

    Those that are named arrays by their annotation, and random keys.
    """
    checks: list[tuple[int, str, Callable[[Any], Any]]] = []
    is_ours = function.__name__.startswith("_")  # which pass on a key or none
    for place, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        check = _NAMED.get(parameter.annotation)
        if name == "key":
            check = _key_or_none if is_ours or parameter.default is None else random_key
        if check is not None and parameter.kind is not parameter.VAR_KEYWORD:
            checks.append((place, name, check))
    return tuple(checks)


def checked(
    checks: Checks, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function after its :func:`checks_of`.

    Raises :class:`DimError` for an array that has no names, and :class:`ModelError` for what is no
    random key.
    """
    for place, name, check in checks:
        if place < len(args):
            x = args[place]
            if (y := check(x)) is not x:
                args = (*args[:place], y, *args[place + 1 :])
        elif name in options:
            x = options[name]
            if (y := check(x)) is not x:
                options = {**options, name: y}
    return args, options


def _named(x: Any) -> NamedArray:
    return x if isinstance(x, NamedArray) else as_named(x)


def _named_or_none(x: Any) -> NamedArray | None:
    return None if x is None else _named(x)


def _key_or_none(key: Any) -> Any:
    return None if key is None else random_key(key)


_NAMED = {"NamedArray": _named, "NamedArray | None": _named_or_none}


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
