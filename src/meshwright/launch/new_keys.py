"""``python -m meshwright.launch.new_keys FILE`` makes the keys of a cluster."""

from __future__ import annotations

import sys

from ..errors import ClusterError
from .keys import Keys


def main(arguments: list[str]) -> None:
    """Write new keys to the file that is named."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit("usage: python -m meshwright.launch.new_keys FILE")
    try:
        Keys.make().save(arguments[0])
    except ClusterError as error:
        raise SystemExit(f"Error: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
