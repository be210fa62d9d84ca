"""What each message to a server must hold."""

from __future__ import annotations

from ..wire.schema import (
    ANY,
    BOOL,
    COUNT,
    INT,
    MAP,
    NUMBER,
    TEXT,
    Fields,
    list_of,
    mapping,
    optional,
    record,
    row,
)

_NAMES = list_of(TEXT)
_INIT = record(
    kind=TEXT,
    params=optional(MAP),
    seed=optional(INT),
    rows=optional(row(COUNT, COUNT)),
    full_shape=optional(list_of(COUNT)),
    hash=optional(BOOL),
)
_UPDATE = row(TEXT, TEXT, COUNT, optional(MAP))
_CONFIG = record(class_name=TEXT, config=optional(MAP))

_FIELDS: dict[str, Fields] = {
    "hello": {},
    "create": {"name": TEXT, "shape": list_of(COUNT), "dtype": TEXT, "init": _INIT},
    "read": {"names": _NAMES, "round": optional(INT), "at_least": optional(ANY)},
    "lookup": {"name": TEXT, "make": optional(BOOL)},
    "push": {
        "updates": list_of(_UPDATE),
        "step": optional(INT),
        "done_below": optional(INT),
        "seen": optional(INT),
        "round": optional(INT),
        "of": optional(INT),
        "then_read": optional(_NAMES),
    },
    "optimizer": {
        "group": TEXT,
        "config": _CONFIG,
        "names": _NAMES,
        "compensation": optional(BOOL),
        "wholes": optional(mapping(TEXT, TEXT)),
        "exclude_from_weight_decay": optional(_NAMES),
    },
    "rate": {"group": TEXT, "learning_rate": NUMBER},
    "slots": {"names": _NAMES},
    "load": {
        "values": optional(_NAMES),
        "tables": optional(_NAMES),
        "slots": optional(list_of(row(TEXT, _NAMES))),
        "steps": optional(mapping(TEXT, COUNT)),
    },
    "keys": {"name": TEXT},
    "piece": {"name": TEXT, "start": COUNT, "stop": COUNT},
    "put": {"name": TEXT, "slots": _NAMES, "scalars": MAP, "steps": COUNT},
    "round": {"round": INT, "of": INT},
    "norms": {},
    "clip": {"round": INT, "totals": mapping(TEXT, NUMBER)},
    "fence": {"incarnation": TEXT},
    "snapshot": {"path": TEXT},
    "restore": {"path": TEXT},
    "stats": {},
    "stop": {},
}
# Of every message, whatever it asks for.
_COMMON: Fields = {"id": optional(INT), "incarnation": optional(TEXT)}
SCHEMAS = {kind: {**_COMMON, **fields} for kind, fields in _FIELDS.items()}

# These decide who may work, which files are written, and whether the server runs at all.
RESERVED = frozenset({"fence", "snapshot", "restore", "stop"})
