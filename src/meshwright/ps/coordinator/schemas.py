"""What each message to a coordinator must hold."""

from __future__ import annotations

import re

from ..wire.schema import (
    ANY,
    BOOL,
    COUNT,
    INT,
    MAP,
    NUMBER,
    TEXT,
    Fields,
    Kind,
    list_of,
    optional,
    row,
)

_task = re.compile(r"[a-z]+:\d{1,9}")
TASK = Kind("a task such as 'worker:0'", lambda v: type(v) is str and bool(_task.fullmatch(v)))
_PID = Kind("a process id", lambda v: COUNT.fits(v) and 0 < v < 1 << 31)

_USED = list_of(row(TEXT, COUNT))  # iterator's key, how many elements the step took
# Server, applied, version, staleness, dropped, generation, base.
_SAID = row(COUNT, BOOL, INT, INT, BOOL, COUNT, INT)
_OPTIMIZER = row(MAP, list_of(TEXT), MAP)  # config, variables, options of gradients
_RESULT = row(INT, INT, ANY, row(COUNT, COUNT), list_of(_SAID), _USED, NUMBER, list_of(_OPTIMIZER))

SCHEMAS: dict[str, Fields] = {
    "join": {"task": TASK, "incarnation": TEXT, "pid": _PID, "host": TEXT},
    "results": {"results": list_of(_RESULT), "restarts": list_of(row(COUNT, COUNT, COUNT))},
    "failed": {"step": INT, "attempt": INT, "used": _USED, "error": MAP},
    "passed": {"step": INT, "attempt": INT},
    "recalled": {"steps": list_of(INT)},
    "next": {
        "key": TEXT,
        "step": INT,
        "used": COUNT,
        "missing": optional(INT),
        "before": list_of(row(INT, COUNT)),
    },
    "alive": {"what": TEXT, "step": optional(INT), "for_s": NUMBER},
    "leave": {},
}
# A server's sign of life; a worker's is "alive" above.
BEAT: Fields = {"task": TASK, "pid": _PID, "every_s": NUMBER}
COMMON: Fields = {"id": optional(INT)}
