"""``python -m meshwright.launch.call FOLDER``: call the function that is pickled there.

The package is imported before this file is run, so the process has joined its group by then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cloudpickle

from .remote import CALL, PATHS, VALUE
from .rows import Rows, spooled


def main(folder: Path) -> None:
    """Make the call, with the rows first if there are any; what it returns is written whole."""
    paths = json.loads((folder / PATHS).read_text())
    sys.path += [path for path in paths if path not in sys.path]
    function, args, kwargs = cloudpickle.loads((folder / CALL).read_bytes())
    rows: Rows | None = spooled(folder)
    value = function(*args, **kwargs) if rows is None else function(rows, *args, **kwargs)
    (folder / "new").write_bytes(cloudpickle.dumps(value))
    (folder / "new").replace(folder / VALUE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
