"""A server of a small model, as a program: ``http_serving.py '{"port": 0}'``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from http_models import Linear, Shelf

from meshwright.serving.http.app import serving_app
from meshwright.serving.http.limits import Limits
from meshwright.serving.http.run import Listening, run

if __name__ == "__main__":
    how = json.loads(sys.argv[1])
    for name in ("certificate", "private_key"):
        if name in how:
            how[name] = Path(how[name])
    keys = how.pop("keys", ())
    limits = Limits(body_bytes=1 << 20, read_s=2.0)
    run(
        lambda: serving_app(Shelf(Linear(version=str(os.getpid()))), limits=limits, keys=keys),
        Listening(**how),
    )
