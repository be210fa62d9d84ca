"""The layout map: ordered pairs of a path pattern and a layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from ..errors import LayoutError
from ..views import Viewable
from .dim_names import DimNames
from .layout import Layout, Specs, as_layout
from .mesh import Mesh

Given = Layout | DimNames  # where something lies, or what its dims are called


class PathLayout(NamedTuple):
    """A path pattern and its layout, or the names of dims that rules lay along axes."""

    pattern: str
    layout: Given


class LayoutMap(Viewable, MutableMapping[str, Given]):
    """An ordered mapping from path pattern to layout; it behaves as a dict does.

    ``layouts`` are the first entries, ``mesh`` is the one that :func:`~meshwright.layout_map_scope`
    takes. A value is a bare sequence of axes, a :class:`Layout`, bound or not, a Keras
    ``TensorLayout``, or names of dims (:func:`dims`), which a strategy's ``rules=`` lay along axes.
    A pattern is a regular expression that may be found anywhere in a variable's path
    (``re.search``); see :meth:`find` for which one wins. Raises :class:`LayoutError` for an invalid
    regular expression.

    >>> layouts = LayoutMap()
    >>> layouts["feature.*kernel"] = [None, "model"]
    >>> print(layouts.find(["net/feature/kernel"]).layout)
    [unsharded, model]
    """

    def __init__(self, mesh: Mesh | None = None, layouts: Any = ()) -> None:
        if mesh is not None and not isinstance(mesh, Mesh):
            raise LayoutError(
                f"the first argument of LayoutMap must be a meshwright Mesh; received {mesh!r}. "
                "Layouts alone are LayoutMap(layouts=...)."
            )
        self.mesh = mesh
        self._layouts: dict[str, Given] = {}
        self.update(_pairs(layouts))

    def __setitem__(self, pattern: str, layout: Given | Specs) -> None:
        if not isinstance(pattern, str) or not pattern:
            raise LayoutError(
                f"a pattern must be a string such as 'feature.*kernel'; received {pattern!r}."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise LayoutError(
                f"pattern {pattern!r} is not a valid regular expression: {error}."
            ) from error
        try:
            self._layouts[pattern] = as_given(layout)
        except LayoutError as error:
            raise LayoutError(f"the layout of {pattern!r}: {error}") from None

    def __getitem__(self, pattern: str) -> Given:
        return self._layouts[pattern]

    def __delitem__(self, pattern: str) -> None:
        del self._layouts[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def text_of(self, pattern: str) -> str:
        """The layout of a pattern as it is printed."""
        layout = self[pattern]
        return repr(layout) if isinstance(layout, DimNames) else str(layout)

    def __repr__(self) -> str:
        lines = "".join(f"\n  {pattern!r}: {self.text_of(pattern)}" for pattern in self)
        return f"LayoutMap({len(self)} layouts){lines}"

    @property
    def entries(self) -> tuple[PathLayout, ...]:
        """Patterns and layouts in order, as a value."""
        return tuple(PathLayout(pattern, layout) for pattern, layout in self._layouts.items())

    def find(self, spellings: Iterable[str] | str) -> PathLayout | None:
        """The entry for a variable that has these paths, or ``None``; see :func:`find_layout`.

        Raises :class:`LayoutError` for a value that is not a path.
        """
        paths = [spellings] if isinstance(spellings, str) else spellings
        if not isinstance(paths, Iterable) or not all(isinstance(p, str) for p in (*paths,)):
            raise LayoutError(f"expected a path, such as 'hidden/kernel'; received {spellings!r}.")
        return find_layout(self.entries, paths)

    def get_default_mesh(self) -> Mesh | None:
        """The mesh that the map was made with (TensorFlow DTensor's name for it)."""
        return self.mesh


def _pairs(layouts: Any) -> Any:
    """Layouts as pairs of pattern and layout. Raises :class:`LayoutError` for anything else."""
    if isinstance(layouts, Mapping):
        return layouts
    iterable = isinstance(layouts, Iterable) and not isinstance(layouts, str)
    pairs = list(layouts) if iterable else None
    if pairs is None or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise LayoutError(
            "expected layouts as a dict from path pattern to layout, {'hidden.*kernel': [None, "
            f"'model']}}; received {layouts!r}."
        )
    return pairs


def as_given(layout: Given | Specs) -> Given:
    """Names of dims as they are; anything else as a :class:`Layout`, Keras' own among it."""
    if isinstance(layout, DimNames):
        return layout
    keras_axes = getattr(layout, "axes", None) if hasattr(layout, "device_mesh") else None
    return as_layout(layout if keras_axes is None else keras_axes)


def find_layout(entries: Iterable[PathLayout], spellings: Iterable[str] | str) -> PathLayout | None:
    """The entry that lays out a variable with these paths, or with this one.

    A pattern that *is* one of the paths wins; else the first that ``re.search`` finds in one of
    them. In paths ``/`` and ``.`` are alike.

    >>> layouts = LayoutMap(layouts={"kernel": ["x"], "a/kernel": ["y"]}).entries
    >>> find_layout(layouts, ["a.kernel"]).layout, find_layout(layouts, ["b.kernel"]).layout
    (Layout(['y']), Layout(['x']))
    """
    return Finder(entries).find([spellings] if isinstance(spellings, str) else spellings)


class Finder:
    """Finds the entries of many variables, as :func:`find_layout` finds that of one.

    Plans have a pattern for each variable, so that not every pattern is compared with every path.

    >>> finder = Finder(LayoutMap(layouts={"kernel": ["x"], "a/kernel": ["y"]}).entries)
    >>> [finder.find([path]).pattern for path in ("a.kernel", "b.kernel")]
    ['a/kernel', 'kernel']
    """

    def __init__(self, entries: Iterable[PathLayout]) -> None:
        self._entries = tuple(entries)
        self._places: dict[str, int] = {}
        for place, entry in enumerate(self._entries):
            self._places.setdefault(_with("/", entry.pattern), place)

    def find(self, spellings: Iterable[str]) -> PathLayout | None:
        """The entry that lays out a variable with these paths, or ``None``."""
        paths = list(spellings)
        exact = [self._places[path] for p in paths if (path := _with("/", p)) in self._places]
        if exact:
            return self._entries[min(exact)]
        return next((entry for entry in self._entries if finds(entry.pattern, paths)), None)


def finds(pattern: str, spellings: Iterable[str]) -> bool:
    """Whether the pattern is found in one of these paths; ``/`` is like ``.``.

    >>> finds("a/k", ["net.a.kernel"]), finds("a/k$", ["net.a.kernel"])
    (True, False)
    """
    paths = {_with(separator, path) for path in spellings for separator in "/."}
    return any(re.search(pattern, path) for path in paths)


def names_exactly(pattern: str, spellings: Iterable[str]) -> bool:
    """Whether the pattern is one of these paths, rather than found in one; ``/`` is like ``.``.

    >>> names_exactly("a/kernel", ["a.kernel"]), names_exactly("kernel", ["a.kernel"])
    (True, False)
    """
    return _with("/", pattern) in {_with("/", path) for path in spellings}


def _with(separator: str, path: str) -> str:
    return path.replace(".", separator).replace("/", separator)
