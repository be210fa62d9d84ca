"""Values as text: plain where it is kept, in colours and to its width where a terminal shows it."""

from __future__ import annotations

import importlib
import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

import meshwright as mw
from meshwright import display
from meshwright.display.text.columns import Columns, Line, first_rows, paragraphs, print_text
from meshwright.hlo.traffic import Transfer
from meshwright.planning.dry_run import DryRun, Memory
from meshwright.targets.target import Target

RUN = DryRun(
    "net[red]",
    Target.of("cpu:8"),
    (("batch", 8),),
    Memory(6 << 30, 12 << 30, 1, 1, 6, peak_is="the sum of all that is known of the step"),
    notes=("a note that is much longer than the terminal is wide, so it goes on below",),
)


def shown(value: object, width: int, **how: object) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False, **how)  # type: ignore[arg-type]
    console.print(value)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", display.VIEWS)
def test_every_view_is_there(kind):
    for name, place in display.VIEWS[kind].items():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(f"meshwright.{module}"), function))
        module, _, value = name.rpartition(".")
        assert issubclass(
            getattr(importlib.import_module(f"meshwright.{module}"), value), mw.views.Viewable
        )


def test_plain_text_is_aligned_and_has_no_colours():
    table = Columns([("a", "1", "x"), ("bcd", "20", "")], right=(1,))
    text = paragraphs(Line("title", "bold red"), [table, []], "end")
    assert str(text) == "title\n  a     1  x\n  bcd  20\nend"


def test_a_terminal_shows_every_word_in_its_own_width():
    wide, narrow, slim = (shown(RUN, width) for width in (400, 60, 20))
    assert wide.split() == slim.split() == str(RUN).split()
    assert sorted(wide.split()) == sorted(narrow.split())  # a cell goes on below, in its column
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines()))


def test_a_terminal_shows_colours_and_files_do_not(monkeypatch, capsys):
    coloured = shown(RUN, 80, force_terminal=True, color_system="standard")
    assert "\x1b[1m" in coloured
    print_text(RUN, "[b]")
    assert capsys.readouterr().out == f"{RUN}\n\n[b]\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_text("[b] stays")
    assert "[b] stays" in capsys.readouterr().out


def test_long_tables_say_how_many_rows_are_left_out():
    rows = first_rows([("a", str(number)) for number in range(5)], 3)
    assert rows[-1] == ("", "... and 2 more")
    assert first_rows(rows[:3], 3) == rows[:3]


@pytest.mark.parametrize("lines", [(), ("model.py:7",)])
def test_a_dry_run_says_how_many_collectives_are_left_out(lines):
    sums = [
        Transfer("all-reduce", ("batch",), 8, 1, (name,), ("backward",), ("float32",), lines=lines)
        for name in "abcdefghijklmn"
    ]
    text = str(replace(RUN, not_compiled="as asked", collectives=tuple(sums)))
    assert "... and 2 more" in text
    assert ("written in" in text) == bool(lines)
