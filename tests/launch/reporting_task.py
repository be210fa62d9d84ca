"""A task that only says that it is there: what the tests of local clusters start.

It writes its process's number to ``REPORTS/<job>.<index>.<generation>`` and then sleeps; the code
in ``THEN`` is run before it sleeps.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from meshwright.launch import settings_from
from meshwright.launch.tie import tie_from_environment


def main() -> None:
    tie_from_environment()
    settings = settings_from()
    name = f"{settings.task.job}.{settings.task.index}.{settings.generation}"
    report = Path(os.environ["REPORTS"]) / name
    report.with_suffix(".new").write_text(str(os.getpid()))
    report.with_suffix(".new").rename(report)
    exec(os.environ["THEN"], {"settings": settings, "report": report, "os": os})
    time.sleep(100)


if __name__ == "__main__":
    main()
