"""The values that options are written for: meshes, targets, layouts, bytes, files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import MeshwrightError

if TYPE_CHECKING:
    from ..layouts.layout import Layout
    from ..layouts.mesh import Mesh
    from ..planning.lock import Lock
    from ..targets.hardware import Hardware
    from ..targets.target import Target

_SIZES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class _Read(click.ParamType):
    """A value read from text; an error of Meshwright is one of the option."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.read(value) if isinstance(value, str) else value
        except MeshwrightError as error:
            self.fail(str(error), param, ctx)

    def read(self, text: str) -> Any:
        """The value. Raises an error of Meshwright or of Click."""
        raise NotImplementedError


class MeshText(_Read):
    """``batch=4,model=2``."""

    name = "mesh"

    def read(self, text: str) -> Mesh:
        from ..layouts.mesh import Mesh

        return Mesh.from_string(text)


class PriceText(_Read):
    """A number, or a TOML file with one by target."""

    name = "price"

    def read(self, text: str) -> float | dict[str, float]:
        from ..planning.prices import read_prices

        if Path(text).suffix == ".toml":
            return read_prices(Path(text))
        try:
            price = float(text)
        except ValueError:
            price = -1.0
        if not 0 <= price < float("inf"):
            raise click.BadParameter(
                f"expected a number, 0 or more, or a .toml file; received {text!r}."
            )
        return price


class TargetText(_Read):
    """``v5p:2x2x2``."""

    name = "target"

    def read(self, text: str) -> Target:
        from ..targets.target import Target

        return Target.from_string(text)


class LayoutsText(_Read):
    """``hidden.*kernel:unsharded,model``, several joined by ``;``."""

    name = "pattern:layout"

    def read(self, text: str) -> tuple[tuple[str, Layout], ...]:
        from ..layouts.layout import Layout

        return tuple(
            (pattern, Layout.from_string(f"[{axes}]"))
            for pattern, axes in (self._parts(part) for part in text.split(";"))
        )

    def _parts(self, text: str) -> tuple[str, str]:
        pattern, colon, axes = text.rpartition(":")
        if not (colon and pattern and axes):
            self.fail(
                f"expected pattern:layout, such as hidden.*kernel:unsharded,model; "
                f"received {text!r}."
            )
        return pattern.strip(), axes.strip("[] ")


class OptionText(_Read):
    """``zero=3``: a name and a JSON value, or a bare word; names of ``options`` are refused."""

    name = "name=value"

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options

    def read(self, text: str) -> tuple[str, Any]:
        name, sign, value = text.partition("=")
        if not (sign and name.isidentifier()):
            self.fail(f"expected name=value, such as zero=3; received {text!r}.")
        if name in self._options:
            self.fail(f"{name!r} has an option of its own: {self._options[name]}.")
        try:
            return name, json.loads(value)
        except json.JSONDecodeError:
            return name, value  # a bare word, such as an axis


class BytesText(_Read):
    """``14GiB``."""

    name = "bytes"

    def read(self, text: str) -> int:
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
        unit = (parts[2] or "b") if parts else ""
        if parts is None or unit not in _SIZES or not float(parts[1]):
            self.fail(f"expected a number of bytes above zero, such as 14GiB; received {text!r}.")
        return round(float(parts[1]) * _SIZES[unit])


class BuildText(_Read):
    """``module:function``; that it can be found is checked, the module is not imported."""

    name = "module:function"

    def read(self, text: str) -> str:
        from ..equivalence.finding import check_place

        check_place(text)
        return text


class SizesText(_Read):
    """``1,8,32``."""

    name = "sizes"

    def read(self, text: str) -> tuple[int, ...]:
        sizes = tuple(int(part) if part.strip().isdigit() else 0 for part in text.split(","))
        if not all(sizes):
            self.fail(f"expected whole numbers, such as 1,8,32; received {text!r}.")
        return sizes


class NewFile(_Read):
    """A file that will be written, checked before anything is computed; folders are made."""

    name = "file"

    def __init__(self, what: str) -> None:
        self._what = what

    def read(self, text: str) -> Path:
        from ..files import check_writable

        check_writable(text, self._what)
        return Path(text)


class HardwareText(_Read):
    """``measured``, or a file of hardware."""

    name = "hardware"

    def read(self, text: str) -> Hardware | str:
        from ..targets.hardware import load_hardware

        if text == "measured":
            return text
        if not Path(text).is_file():
            self.fail(f"expected 'measured' or a file of meshwright calibrate; received {text!r}.")
        return load_hardware(text)


class LockFile(_Read):
    """A file of ``meshwright dry-run --save``."""

    name = "file"

    def read(self, text: str) -> Lock:
        from ..planning.lock import Lock

        return Lock.load(text)
