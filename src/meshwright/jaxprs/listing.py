"""A traced program as a list of texts, a line each, that other processes can compare."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .edits import jaxprs_inside
from .lines import line_of

_ADDRESS = re.compile(r"0x[0-9a-f]+")


class Listed(NamedTuple):
    """An equation, and the line of the user's code that it comes from, or the scope; or what a
    program takes or returns, of which no line is known."""

    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.source}: {self.text}" if self.source else self.text


def listed(closed: Any) -> list[Listed]:
    """What a program takes, every equation, each followed by the programs inside it, and what it
    returns; variables have numbers in that order.

    >>> import jax
    >>> traced = jax.make_jaxpr(lambda x: jax.jit(lambda y: y * 2.0)(x) + x)(1.0)
    >>> for each in listed(traced):
    ...     print(each.text.partition("  [")[0])
    program 0 takes v0:float32[]
    v1:float32[] = jit v0
    program 1 takes v2:float32[]
    v3:float32[] = mul v2 2.0
    program 1 returns v3
    v4:float32[] = add v1 v0
    program 0 returns v4
    """
    return [
        Listed(text, "" if eqn is None else str(line_of(eqn) or eqn.source_info.name_stack))
        for eqn, text in _Listing().of(closed)
    ]


def texts_of(closed: Any) -> Iterator[str]:
    """The texts alone, which takes less."""
    return (text for _, text in _Listing().of(closed))


class _Listing:
    """The numbers that were given, and the jaxprs that were listed."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, int] = {}  # a jaxpr that is called again is listed once
        self._kept: list[Any] = []

    def of(self, jaxpr: Any) -> Iterator[tuple[Any, str]]:
        """Every equation with its text, between what is taken and returned, which are of none."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        number = self._known[id(jaxpr)] = len(self._known)
        self._kept.append(jaxpr)  # so that no other one has its address
        yield None, f"program {number} takes {self._made((*jaxpr.constvars, *jaxpr.invars))}"
        for eqn in jaxpr.eqns:
            inner = [getattr(one, "jaxpr", one) for one in jaxprs_inside(eqn)]
            new = [one for one in inner if id(one) not in self._known]
            yield eqn, self._text(eqn, inner)
            for one in new:
                if id(one) not in self._known:
                    yield from self.of(one)
        yield None, f"program {number} returns {self._read(jaxpr.outvars)}"

    def _text(self, eqn: Any, inner: list[Any]) -> str:
        read, made = self._read(eqn.invars), self._made(eqn.outvars)
        options = [f"{k}={_option(v)}" for k, v in sorted(eqn.params.items()) if _is_value(v)]
        options += [f"program {self._known[id(one)]}" for one in inner if id(one) in self._known]
        text = f"{made} = {eqn.primitive.name} {read}"
        text = f"{text}  [{', '.join(options)}]" if options else text
        return _ADDRESS.sub("", text).replace("\n", " ")

    def _read(self, atoms: Iterable[Any]) -> str:
        return " ".join(map(self._name, atoms))

    def _made(self, variables: Iterable[Any]) -> str:
        return " ".join(f"{self._name(var)}:{_kind(var.aval)}" for var in variables)

    def _name(self, atom: Any) -> str:
        if hasattr(atom, "val"):  # a literal
            return str(atom.val)
        return f"v{self._numbers.setdefault(atom, len(self._numbers))}"


@functools.lru_cache(maxsize=1024)
def _kind(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}" if hasattr(aval, "dtype") else str(aval)


def _option(value: Any) -> str:
    """A parameter in words; a set in order, for that of its elements differs between processes."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_option, value)))}}}"
    if type(value) in (tuple, list):
        return f"({', '.join(map(_option, value))})"
    return str(value)


def _is_value(parameter: Any) -> bool:
    """Whether it is not a function, traced or not: JAX shows only the name of one."""
    several = parameter if isinstance(parameter, tuple | list) else (parameter,)
    return not any(
        hasattr(one, "eqns") or hasattr(one, "jaxpr") or callable(one) or hasattr(one, "in_type")
        for one in several
    )
