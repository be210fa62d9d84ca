"""The program ``meshwright``; its commands are the files of the room ``commands``."""

from __future__ import annotations

import click

from .commands.calibrate import calibrate
from .commands.check import check
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.dry_run import dry_run
from .commands.group import HELP, Group, traceback_option
from .commands.launch import launch
from .commands.plan import plan
from .commands.serve import serve
from .commands.show import show


@click.group(cls=Group, context_settings=HELP)
@click.version_option(package_name="meshwright", prog_name="meshwright")
@traceback_option
def main() -> None:
    """Meshwright: one model, any mesh."""


for _command in (show, check, plan, dry_run, calibrate, launch, serve, doctor, demo):
    main.add_command(_command)

if __name__ == "__main__":
    main()
