"""The whole page: one file, no network, no fonts, nothing that runs but its own few lines."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .alternatives import (
    alternatives_section,
    plan_head,
    plan_layouts_section,
    plan_mesh_section,
)
from .collectives import collectives_section
from .head import head, notes_section
from .layers import layers_section
from .layouts import layouts_section
from .markup import Html, tag
from .memory import memory_section
from .meshes import mesh_section
from .timeline import time_section
from .two import pair_head, pair_section

if TYPE_CHECKING:
    from ..pair import Pair
    from ..report import DryRun
    from ..search.plan import Plan

_NAMES = {
    "plan": "Plan",
    "mesh": "Mesh",
    "memory": "Memory",
    "time": "Time",
    "collectives": "Collectives",
    "layers": "FLOPs",
    "layouts": "Layouts",
    "notes": "Notes",
    "figures": "Figures",
}
_PAINTS = ("orange", "pink", "grey")  # that need a pattern in the time line


def of_dry_run(run: DryRun, plan: Plan | None = None) -> str:
    """The report as one HTML page, complete in itself; the same report gives the same page.

    With the plan that the step was laid out by, its alternatives are shown, too. It holds no time
    stamp and asks nothing of a network: its own policy forbids that. All that comes from the user
    is escaped.
    """
    parts = {
        "plan": None if plan is None else alternatives_section(plan),
        "mesh": mesh_section(run),
        "memory": memory_section(run),
        "time": time_section(run),
        "collectives": collectives_section(run),
        "layers": layers_section(run.estimate),
        "layouts": layouts_section(run),
        "notes": notes_section(run),
    }
    return _page(f"{run.name} on {run.target}", head(run), parts)


def of_plan(plan: Plan) -> str:
    """A plan as a page of the same kind: its alternatives, its mesh and its layouts."""
    parts: dict[str, Html | None] = {
        "plan": alternatives_section(plan),
        "mesh": plan_mesh_section(plan),
        "layouts": plan_layouts_section(plan),
    }
    title = f"{plan.name} on {plan.target}" if plan.name else f"A plan for {plan.target}"
    return _page(title, plan_head(plan), parts)


def of_pair(pair: Pair) -> str:
    """Two reports as a page of the same kind."""
    parts: dict[str, Html | None] = {"figures": pair_section(pair)}
    return _page(f"{pair.first.name}: {' and '.join(pair.titles)}", pair_head(pair), parts)


def _page(title: str, top: Html, parts: Mapping[str, Html | None]) -> str:
    """A document with those of the parts that are there, and links to them."""
    there = {name: part for name, part in parts.items() if part is not None}
    links = [tag("a", _NAMES[name], href=f"#{name}") for name in there]
    body = tag(
        "body",
        _patterns(),
        top,
        tag("nav", links, aria_label="Parts of the report"),
        tag("main", list(there.values())),
        tag("script", Html(_text("page.js"))),
    )
    page = tag("html", tag("head", _metas(), tag("title", title), _style()), body, lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _metas() -> list[Html]:
    digest = base64.b64encode(hashlib.sha256(_text("page.js").encode()).digest()).decode()
    # Should something slip through the escaping, a browser still does not run or load it.
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    return [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
    ]


def _style() -> Html:
    return tag("style", Html(_text("page.css")))


def _patterns() -> Html:
    """The paints of the time line; those of bars are in the style sheet."""
    shapes = {
        "orange": tag("path", d="M0 6L6 0", class_="ink"),
        "pink": tag("circle", cx=2, cy=2, r=1.2, class_="dot"),
        "grey": tag("path", d="M0 2H6", class_="ink"),
    }
    found = [
        tag(
            "pattern",
            tag("rect", width=6, height=6, class_=f"s-{paint}"),
            shapes[paint],
            id=f"pat-{paint}",
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
        )
        for paint in _PAINTS
    ]
    return tag("svg", tag("defs", found), class_="defs", width=0, height=0, aria_hidden="true")


@functools.cache
def _text(name: str) -> str:
    """A file that lies beside this one."""
    return (
        importlib.resources.files("meshwright.planning.page")
        .joinpath(name)
        .read_text(encoding="utf-8")
    )
