"""Whether meshes train as one device does: a table per mesh, the worst variables first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...merging import short_list
from .columns import Columns, Line, Paragraphs, paragraphs

if TYPE_CHECKING:
    from ...equivalence.judging import Difference, Equivalence, Gap, UnderMesh

HEADINGS = ("variable", "gradient", "relative", "value", "relative", "of tolerance", "first beyond")
_ROWS = 12  # of a mesh that is equal; what went beyond is always shown in full


def equivalence_text(found: Equivalence, rows: int | None = _ROWS) -> Paragraphs:
    """The whole verdict; ``rows`` is how many variables of a mesh are shown, ``None`` for all."""
    meshes = [["", *_mesh(mesh, rows)] for mesh in found.meshes]
    return paragraphs(opening(found), meshes, "", Line(closing(found), _style(found.equal)))


def opening(found: Equivalence) -> str:
    """What was run."""
    t = found.tolerance
    return (
        f"{found.model}: {found.steps} steps in {t.dtype} on one device, loss "
        f"{found.losses[0]:.6g} → {found.losses[-1]:.6g}. Tolerance: {t.rtol:.0e} of a "
        "variable's largest gradient or change, plus the effect of rounding on one device."
    )


def verdict(each: UnderMesh) -> str:
    """One line for one mesh."""
    if each.first is None:
        return f"{each.mesh.axes_text}: equal to one device"
    where = f" of {each.first.path}" if each.first.path else ""
    what = f"{each.first.quantity}{where}"
    when = "" if each.first.quantity == "initial value" else f" in step {each.first.step}"
    return f"{each.mesh.axes_text}: NOT equal to one device; first difference: {what}{when}"


def rows_of(each: UnderMesh, rows: int | None = _ROWS) -> list[tuple[str, ...]]:
    """A row of texts for each variable that is shown, the worst first."""
    worst = sorted(each.variables, key=lambda v: (v.first is None, -v.excess))
    return [_row(v) for v in (worst if rows is None else worst[: max(rows, len(each.beyond))])]


def _mesh(each: UnderMesh, rows: int | None) -> list[str | Line | Columns]:
    """The verdict of one mesh with its table."""
    shown = rows_of(each, rows)
    wrong = {variable.path for variable in each.beyond}
    marked = [place for place, row in enumerate(shown, start=1) if row[0] in wrong]
    parts: list[str | Line | Columns] = [Line(verdict(each), _style(each.equal))]
    parts += [f"  note: {note}" for note in each.notes]
    parts.append(Columns([HEADINGS, *shown], right=range(1, len(HEADINGS) - 1), marked=marked))
    if more := len(each.variables) - len(shown):
        parts.append(f"  and {more} more variables that differ less (--all shows them)")
    loss = f"largest difference {each.loss.absolute:.2g} (relative {each.loss.relative:.2g})"
    alone = "not compared: the step reports its last micro-batch only"
    parts.append(f"  loss: {loss if each.losses else alone}")
    if noise := [v.path for v in each.variables if v.is_noise]:
        parts.append(
            f"  values of {len(noise)} variable(s) are no evidence, as they move by rounding "
            f"alone, on one device too: {short_list(noise, 5)}"
        )
    return parts


def _style(is_equal: bool) -> str:
    return "bold green" if is_equal else "bold red"


def closing(found: Equivalence) -> str:
    """The last line."""
    wrong = [mesh.mesh.axes_text for mesh in found.meshes if not mesh.equal]
    if not wrong:
        return "Every mesh trains as one device does."
    return f"{len(wrong)} of {len(found.meshes)} meshes do not train as one device does: " + (
        "; ".join(wrong) + "."
    )


def _row(variable: Difference) -> tuple[str, ...]:
    gradient = ("", "") if variable.gradient is None else _figures(variable.gradient)
    first = "" if variable.first is None else str(variable.first)
    used = f"{variable.excess:.0%}" if variable.excess < 10 else f"x {variable.excess:.3g}"
    return variable.path, *gradient, *_figures(variable.value), used, first


def _figures(gap: Gap) -> tuple[str, str]:
    return f"{gap.absolute:.2g}", f"{gap.relative:.2g}"
