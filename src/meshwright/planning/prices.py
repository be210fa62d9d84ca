"""What devices cost: one number for all, or a table by target that a user keeps in a file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..targets.target import Target


def price_of(target: Target, prices: float | Mapping[str, float]) -> float:
    """The price of an hour of one device of a target.

    ``prices`` is that price, or has one by target (``"h100:8"``) or kind (``"h100"``); the target
    itself comes first. Raises :class:`~meshwright.DataError` where it has none.

    >>> price_of(Target.of("h100:8"), {"h100": 2.5, "v5p": 4.2})
    2.5
    """
    if not isinstance(prices, Mapping):
        return prices
    for name in (str(target), target.kind):
        if name in prices:
            return prices[name]
    raise DataError(
        f"the table has no price of {target.kind!r} or {str(target)!r}; it has those of "
        f"{', '.join(prices) or 'nothing'}."
    )


def read_prices(path: Path) -> dict[str, float]:
    """The table of a TOML file: ``h100 = 2.5``, the price of an hour of one device, by target.

    Raises :class:`~meshwright.DataError` for a file that holds something else.
    """
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}.") from error
    wrong = [f"{name} = {value!r}" for name, value in table.items() if not _is_price(value)]
    if wrong or not table:
        raise DataError(
            f"{path}: expected lines such as h100 = 2.5, the price of an hour of one device by "
            f"target; received {', '.join(wrong) or 'none'}."
        )
    return {name: float(value) for name, value in table.items()}


def _is_price(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
