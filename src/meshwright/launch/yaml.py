"""Plain values as YAML: mappings, lists, texts, numbers. Written only; nothing here reads YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")  # not texts, in YAML


def to_yaml(value: Mapping[str, Any]) -> str:
    """A document of YAML, in the order of the mapping.

    >>> print(to_yaml({"kind": "JobSet", "spec": {"values": [75], "flag": "on"}}), end="")
    kind: JobSet
    spec:
      values:
      - 75
      flag: "on"
    """
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            if isinstance(entry, Mapping | list | tuple) and entry:
                yield f"{_scalar(key)}:"
                indent = "  " if isinstance(entry, Mapping) else ""
                yield from (f"{indent}{line}" for line in _lines(entry))
            else:
                yield f"{_scalar(key)}: {_scalar(entry)}"
    elif isinstance(value, list | tuple) and value:
        for entry in value:
            first, *rest = _lines(entry)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)  # which is YAML as well
