"""What values show in a notebook: HTML for each that a person looks at, escaped and alone."""

from __future__ import annotations

import html.parser

import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import display
from meshwright.equivalence.judging import Difference, Equivalence, Gap, Tolerance, UnderMesh
from meshwright.planning.dry_run import DryRun, Memory
from meshwright.planning.measurement import Measured, SeenCollective
from meshwright.planning.search.plan import _EXAMPLE
from meshwright.targets.target import Target

MESH = mw.Mesh({"batch": 4, "model": 2})
SLY = "<script>alert('&')</script>"
RUN = DryRun(SLY, Target.of("cpu:8"), MESH.axes, Memory(6, 12, 1, 1, 6), notes=(SLY,))
SEEN = Measured(
    *(SLY, "cpu", "cpu", MESH.axes, 2**30, 12, 1, 1, 40, SLY, (0.25, 0.5)),
    (SeenCollective("all-reduce", ("batch",), 2.0, 12, 1e-4),),
)


def explanation():
    program = mw.jax_program(
        lambda params, batch: (batch["x"] @ params[SLY]).sum(), {SLY: np.ones([8, 4])}, optax.sgd(1)
    )
    mesh = mw.create_mesh(MESH.axes)
    placement = mw.Placement.of(mesh, {".*": [None, "model"]})
    return mw.Trainer(program, placement).explain()


def equivalence():
    variable = Difference(SLY, "parameter", None, Gap(1.0, 1.0, 2.0), None)
    under = UnderMesh(MESH, (variable,), (1.0,), Gap(0, 0, 0), None, (SLY,))
    return Equivalence(SLY, 1, Tolerance(1e-5, "float32", 1e-7), (1.0,), (under,))


VALUES = {
    "mesh": (lambda: MESH, "batch=4, model=2"),
    "layout": (lambda: mw.Layout([None, "model"], MESH), "2 pieces × 4 copies"),
    "unbound layout": (lambda: mw.Layout([None, "model"]), "<td>model</td>"),
    "layout map": (lambda: mw.LayoutMap(layouts={f"{SLY}": [None, "model"]}), "[unsharded, model]"),
    "explanation": (explanation, "1 variables on batch=4, model=2, 64 B per device"),
    "tick table": (lambda: mw.Pipeline("stage", 4).table(2), "1f1b: 2 stages, 4 micro-batches"),
    "dry run": (lambda: RUN, "fit unknown"),
    "plan": (lambda: mw.Plan.from_json(_EXAMPLE), "Plan for h100:8: batch=8, ZeRO 1"),
    "measured": (lambda: SEEN, '<td class="n">1 GiB</td>'),
    "comparison": (lambda: RUN.beside(SEEN), "parameters"),
    "pair": (lambda: RUN.beside(RUN), "<td>parameters</td>"),
    "equivalence": (equivalence, "equal to one device"),
}


class Tags(html.parser.HTMLParser):
    """Which elements there are, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen, self.open = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", VALUES)
def test_a_value_shows_itself_as_whole_and_escaped_html(name):
    make, expected = VALUES[name]
    value = make()
    visible = value._repr_html_()
    assert expected in visible
    tags = Tags(visible)
    assert tags.open == []
    assert not tags.seen & {"script", "link", "iframe"}
    assert "http" not in visible.replace("http://www.w3.org", "")


@pytest.mark.parametrize("name", VALUES)
def test_a_terminal_of_ipython_shows_a_value_as_it_prints(name):
    value, texts = VALUES[name][0](), []

    class Printer:
        text = staticmethod(texts.append)

    value._repr_pretty_(Printer(), False)
    assert texts == [str(value)]


def test_every_view_belongs_to_a_class_that_asks_for_it():
    classes = {type(make()).__mro__ for make, _ in VALUES.values()}
    names = {f"{c.__module__}.{c.__qualname__}" for mro in classes for c in mro}
    assert {f"meshwright.{name}" for name in display.VIEWS["notebook"]} <= names


def test_what_has_no_view_shows_none():
    class Other(mw.views.Viewable):
        pass

    assert Other()._repr_html_() is None


def test_a_long_table_is_shown_in_part():
    layouts = mw.LayoutMap(layouts={f"layer_{i}": [None] for i in range(300)})
    visible = layouts._repr_html_()
    assert "layer_199<" in visible
    assert "layer_200<" not in visible
    assert "and 100 more; print() shows all" in visible
