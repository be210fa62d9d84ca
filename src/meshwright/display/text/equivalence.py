"""Whether meshes train as one device does: a table per mesh, the worst variables first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...equal_layers import short_list
from .columns import Columns, Line, Paragraphs, paragraphs

if TYPE_CHECKING:
    from ...equivalence.judging import Difference, Equivalence, Gap, UnderMesh

HEADINGS = ("variable", "gradient", "relative", "value", "relative", "of tolerance", "first beyond")
_ROWS = 12  # of a mesh that is equal; what went beyond is always shown in full


def equivalence_text(result: Equivalence, rows: int | None = _ROWS) -> Paragraphs:
    """The whole verdict; ``rows`` is how many variables of a mesh are shown, ``None`` for all."""
    meshes = [["", *_mesh(mesh, rows)] for mesh in result.meshes]
    return paragraphs(opening(result), meshes, "", Line(closing(result), _style(result.equal)))


def opening(result: Equivalence) -> str:
    """What was run."""
    t, losses = result.tolerance, result.losses
    loss = f", loss {losses[0]:.6g} → {losses[-1]:.6g}" if losses else ""
    return (
        f"{result.model}: {result.steps} steps in {t.dtype} on one device{loss}. Tolerance: "
        f"{t.rtol:.0e} of a variable's largest gradient or change, plus the effect of rounding on "
        "one device."
    )


def verdict(under_mesh: UnderMesh) -> str:
    """One line for one mesh."""
    if under_mesh.first is None:
        return f"{under_mesh.mesh.axes_text}: equal to one device"
    where = f" of {under_mesh.first.path}" if under_mesh.first.path else ""
    what = f"{under_mesh.first.quantity}{where}"
    when = (
        "" if under_mesh.first.quantity == "initial value" else f" in step {under_mesh.first.step}"
    )
    return f"{under_mesh.mesh.axes_text}: NOT equal to one device; first difference: {what}{when}"


def rows_of(under_mesh: UnderMesh, rows: int | None = _ROWS) -> list[tuple[str, ...]]:
    """A row of texts for each variable that is shown, the worst first."""
    worst = sorted(under_mesh.variables, key=lambda v: (v.first is None, -v.excess))
    return [
        _row(v) for v in (worst if rows is None else worst[: max(rows, len(under_mesh.beyond))])
    ]


def _mesh(under_mesh: UnderMesh, rows: int | None) -> list[str | Line | Columns]:
    """The verdict of one mesh with its table."""
    selection = rows_of(under_mesh, rows)
    wrong = {variable.path for variable in under_mesh.beyond}
    marked = [place for place, row in enumerate(selection, start=1) if row[0] in wrong]
    parts: list[str | Line | Columns] = [Line(verdict(under_mesh), _style(under_mesh.equal))]
    parts += [f"  note: {note}" for note in under_mesh.notes]
    parts.append(Columns([HEADINGS, *selection], right=range(1, len(HEADINGS) - 1), marked=marked))
    if more := len(under_mesh.variables) - len(selection):
        parts.append(f"  and {more} more variables that differ less (--all shows them)")
    off = under_mesh.loss
    loss = f"largest difference {off.absolute:.2g} (relative {off.relative:.2g})"
    alone = "not compared: the step has no log 'loss' of its whole batch"
    parts.append(f"  loss: {loss if under_mesh.losses else alone}")
    if noise := [v.path for v in under_mesh.variables if v.is_noise]:
        parts.append(
            f"  values of {len(noise)} variable(s) are no evidence, as they move by rounding "
            f"alone, on one device too: {short_list(noise, 5)}"
        )
    return parts


def _style(is_equal: bool) -> str:
    return "bold green" if is_equal else "bold red"


def closing(result: Equivalence) -> str:
    """The last line."""
    wrong = [mesh.mesh.axes_text for mesh in result.meshes if not mesh.equal]
    if not wrong:
        return "Every mesh trains as one device does."
    return f"{len(wrong)} of {len(result.meshes)} meshes do not train as one device does: " + (
        "; ".join(wrong) + "."
    )


def _row(variable: Difference) -> tuple[str, ...]:
    gradient = ("", "") if variable.gradient is None else _figures(variable.gradient)
    first = "" if variable.first is None else str(variable.first)
    used = f"{variable.excess:.0%}" if variable.excess < 10 else f"x {variable.excess:.3g}"
    return variable.path, *gradient, *_figures(variable.value), used, first


def _figures(gap: Gap) -> tuple[str, str]:
    return f"{gap.absolute:.2g}", f"{gap.relative:.2g}"
