"""A server as a process of its own: ``python server_process.py ADDRESS [options]``."""

from __future__ import annotations

import argparse
import os
import threading

from meshwright.launch.keys import Keys
from meshwright.launch.settings import TaskSettings
from meshwright.launch.spec import ClusterSpec, Task
from meshwright.ps.server.loop import serve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--chief", default="ipc:///nonexistent/chief")
    parser.add_argument("--keys")
    parser.add_argument("--directory")
    parser.add_argument("--every", type=int)
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--orphan", type=float)
    parser.add_argument("--heartbeat", type=float, default=0.05)
    options = parser.parse_args()
    threading.Thread(target=end_with_parent, daemon=True).start()
    jobs = {"chief": [options.chief], "worker": ["ipc:///nonexistent/w"], "ps": [options.address]}
    settings = TaskSettings(
        Task("ps", 0),
        ClusterSpec(jobs),
        None if options.keys is None else Keys.load(options.keys),
        options.heartbeat,
        options.directory,
        options.every,
        options.generation,
        options.orphan,
    )
    serve(settings)


def end_with_parent() -> None:
    os.read(0, 1)  # standard input is a pipe of the test's: it ends with it
    os._exit(3)


if __name__ == "__main__":
    main()
