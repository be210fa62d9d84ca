"""``meshwright doctor``: what is installed, and what is missing."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import click

from ..units import bytes_text
from .group import Command, option, traceback_option

if TYPE_CHECKING:
    from .diagnosis import Diagnosis, Package

_PER_CORE, _AT_LEAST = 4, 8  # processes that --processes may start


@click.command(cls=Command, short_help="Report packages, devices, and what is missing.")
@option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@option(
    "--processes",
    type=click.IntRange(min=2),
    help="Also start this number of processes, and measure the connections between them.",
)
@traceback_option
def doctor(as_json: bool, processes: int | None) -> None:
    """Report the installed packages, the devices, and what is missing.

    With --processes, start processes on this machine and report their versions, devices and
    clocks, and the latency and bandwidth of each collective between them. `meshwright launch ...
    doctor` does the same on several hosts; so does `srun python -m meshwright.fabric`.

    Exits with status 0 if Meshwright can be used here, and with 1 if not.
    """
    from .diagnosis import examine

    if as_json and processes:
        raise click.UsageError("--json: only valid without --processes.")

    diagnosis = examine()
    most = max(_AT_LEAST, _PER_CORE * diagnosis.cores)
    if processes and processes > most:
        raise click.BadParameter(
            f"{processes} processes on {diagnosis.cores} cores would measure how long they wait "
            f"for a core, not their connections; at most {most} here.",
            param_hint="--processes",
        )
    if as_json:
        click.echo(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        _print_diagnosis(diagnosis)
    if diagnosis.usable and processes:
        from ..launch.group import run_module
        from ..launch.group_options import GroupOptions

        click.echo()
        raise SystemExit(run_module("meshwright.fabric", GroupOptions(processes)))
    raise SystemExit(0 if diagnosis.usable else 1)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    # Without Rich, which may be missing.
    click.secho(
        f"meshwright {diagnosis.meshwright}, Python {diagnosis.python}, {diagnosis.system}, "
        f"{diagnosis.cores} cores",
        bold=True,
    )
    for title, required in (("required", True), ("optional", False)):
        click.echo(f"\n{title}")
        for package in diagnosis.packages:
            if package.required == required:
                _print_package(package)
    click.echo("\ndevices")
    for line in _device_lines(diagnosis):
        click.echo(f"  {line}")
    click.echo("\nsettings")
    for name, value in diagnosis.environment.items():
        click.echo(f"  {name:<20} {'not set' if value is None else value}")
    click.echo(f"\ndata\n  {diagnosis.data}\n")
    _print_verdict(diagnosis)


def _print_package(package: Package) -> None:
    version = package.version or "not installed"
    colour = {"ok": "green", "broken": "red"}.get(
        package.state, "red" if package.required else "yellow"
    )
    click.echo(f"  {package.name:<18} ", nl=False)
    click.secho(f"{version:<14}", fg=colour, nl=False)
    extra = f" [{package.extra}]" if package.extra else ""
    click.echo(f" {package.fault or package.purpose}{extra}")


def _device_lines(diagnosis: Diagnosis) -> list[str]:
    alike = Counter((d.platform, d.kind, d.memory_bytes) for d in diagnosis.devices)
    lines = [
        f"{count} {platform} ({kind}"
        + (f", {bytes_text(memory)} each)" if memory else ", memory unknown)")
        for (platform, kind, memory), count in alike.items()
    ]
    process = f"process {diagnosis.process_index} of {diagnosis.process_count}"
    return [*lines, process] if lines else ["none"]


def _print_verdict(diagnosis: Diagnosis) -> None:
    for note in diagnosis.notes:
        click.secho(f"note: {note}", fg="yellow")
    for fault in diagnosis.faults:
        click.secho(f"fault: {fault}", fg="red")
    if diagnosis.usable:
        click.secho("All required packages are installed and work.", fg="green")
    if diagnosis.command:
        click.echo(f"To repair:  {diagnosis.command}")
    if diagnosis.optional_command:
        click.echo(f"For the missing extras:  {diagnosis.optional_command}")
