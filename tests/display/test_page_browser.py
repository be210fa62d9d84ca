"""The page in a real browser: it loads in silence, sorts, filters, unfolds, and prints whole."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import keras
import pytest
from keras import layers

import meshwright as mw
from meshwright.frontends.dry_runs import dry_run
from meshwright.frontends.keras.abstract import abstract
from meshwright.planning.dry_run import DryRun
from meshwright.serving.api import Histogram, ModelStatus, TensorSpec, Weight
from meshwright.serving.http.overview import Overview, Served
from meshwright.targets.hardware import Hardware, Link
from meshwright.views import view_of

pytestmark = [pytest.mark.targets, pytest.mark.alone]

_HOW = "pip install playwright, and apt-get install chromium (or: playwright install chromium)"
GUESS = Hardware(
    "guess",
    (("float32", 1e9),),
    memory_bytes=1 << 26,
    memory_bandwidth_bytes_per_s=1e9,
    links=(Link("shared", "shared", 1e9),),
)
FIRST = "#layouts-table tbody tr:not(.out):not(.more) td:first-child"
A4_PIXELS = 703  # of the width between the margins of page.css, at 96 to the inch


class Doubled(layers.Layer):
    """A layer whose own lines the report shows."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.inner = layers.Dense(64, name="inner_of_the_doubled_layer")

    def call(self, x: Any) -> Any:
        return x + self.inner(x)


@functools.cache
def report() -> DryRun:
    """Of a model of many layers, with an unexpected gather."""
    with abstract():
        model = keras.Sequential([keras.Input([64])])
        for name in ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "last"):
            model.add(layers.Dense(64, activation="relu", name=name))
        model.add(Doubled("a_layer_of_the_users_own"))
        model.compile("adam", "mse")
    rules = {"first/kernel": [None, "model"], "inner_of.*/kernel": [None, "model"]}
    strategy = mw.Sharded(mw.Mesh({"batch": 4, "model": 2}), rules)
    rows = jax.ShapeDtypeStruct((64, 64), "float32")
    return dry_run(model, (rows, rows), strategy=strategy, target="cpu:8", hardware=GUESS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason=f"needs a browser: {_HOW}")
    with api.sync_playwright() as started:
        own = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chrome")
        try:
            result = started.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium starts ({str(error).splitlines()[0]}): {_HOW}")
        yield result
        result.close()


@pytest.fixture
def opened(browser, tmp_path) -> Iterator[Any]:
    """The page; whatever it complains of, or asks for, is an error."""
    report().save(tmp_path / "report.html")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url))
    page.goto((tmp_path / "report.html").as_uri())
    yield page
    assert [
        complaint for complaint in complaints if not complaint.startswith(("file:", "data:"))
    ] == []
    page.close()


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def numbers(page: Any, column: int) -> list[float]:
    """The numbers by which a column of the layouts is sorted, in the order that is shown."""
    script = f"cells => cells.map(cell => Number(cell.parentNode.cells[{column}].dataset.v))"
    return page.locator(FIRST).evaluate_all(script)


def test_it_loads_in_silence_and_asks_for_nothing(opened):
    assert report().name in opened.locator("h1").inner_text()
    assert opened.locator("section").count() == 8
    assert opened.locator("figure svg").count() >= 4


def test_names_in_bars_are_seen_whole_or_not_at_all(opened):
    script = """names => names.map(name => {
        const own = name.getBoundingClientRect(), part = name.parentNode.getBoundingClientRect();
        const isBelow = own.top >= part.bottom - 1;
        const isInside = own.left >= part.left - 1 && own.right <= part.right + 1;
        return isBelow ? "below" : isInside ? "inside" : "cut: " + name.innerText;
    })"""
    observations = []
    for width in (320, 390, 1280):
        opened.set_viewport_size({"width": width, "height": 900})
        observations += opened.locator("#memory > figure > .bar .part b").evaluate_all(script)
    assert {*observations} == {"below", "inside"}


def test_an_evil_name_runs_nothing(opened, browser, tmp_path):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    replace(report(), name=evil, notes=(evil,)).save(tmp_path / "evil.html")
    page = browser.new_page()
    messages: list[object] = []
    page.on("dialog", lambda dialog: (messages.append(dialog), dialog.dismiss()))
    page.goto((tmp_path / "evil.html").as_uri())
    assert page.locator("h1").inner_text() == evil
    assert messages == []


def test_a_click_sorts_by_numbers_and_another_turns_them_round(opened):
    head = opened.locator("#layouts-table th", has_text="bytes per device")
    opened.locator("#layouts-table button.all").click()
    head.locator("button").click()
    falling = numbers(opened, 7)
    assert len(falling) > 20
    assert falling == sorted(falling, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").click()
    assert numbers(opened, 7) == sorted(falling)
    assert head.get_attribute("aria-sort") == "ascending"


def test_texts_sort_as_people_read_them_and_from_the_keyboard(opened):
    opened.locator("#layouts-table button.all").click()
    button = opened.locator("#layouts-table th", has_text="variable").locator("button")
    button.focus()
    opened.keyboard.press("Enter")
    rising = texts(opened, FIRST)
    assert rising == sorted(rising, key=str.lower)
    before = opened.evaluate("document.activeElement.textContent")
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.textContent") != before


def test_the_filter_leaves_the_rows_that_hold_all_its_words(opened):
    opened.locator("#layouts-table input").fill("third KERNEL")
    left = texts(opened, FIRST)
    assert left
    assert all("third" in label and "kernel" in label for label in left)
    status = opened.locator("#layouts-table output").inner_text()
    assert status.startswith(f"{len(left)} of ")
    opened.locator("#layouts-table input").fill("no such thing")
    assert texts(opened, FIRST) == []
    opened.locator("#layouts-table input").fill("")
    assert len(texts(opened, FIRST)) == 20


def test_rows_that_are_folded_away_come_with_a_button(opened):
    rows = opened.locator("#layouts-table tbody tr").count()
    button = opened.locator("#layouts-table button.all")
    assert f"all {rows} rows" in button.inner_text()
    button.click()
    assert len(texts(opened, FIRST)) == rows
    assert not button.is_visible()


@pytest.mark.parametrize("width", [320, 400, 768, 1100, 1280])
def test_nothing_has_to_be_scrolled_sideways(opened, width):
    opened.set_viewport_size({"width": width, "height": 800})
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert _clipped(opened, width) == []


def test_print_shows_every_row_and_clips_no_table(opened):
    opened.set_viewport_size({"width": A4_PIXELS, "height": 1000})
    opened.emulate_media(media="print")
    assert _clipped(opened, A4_PIXELS) == []
    hidden = opened.locator("tbody tr").evaluate_all(
        "rows => rows.filter("
        "row => !row.closest('details:not([open])') && !row.offsetHeight).length"
    )
    assert hidden == 0
    assert not opened.locator("nav").is_visible()
    assert opened.pdf(format="A4", print_background=True).startswith(b"%PDF")


def test_headings_hold_no_buttons_on_paper_and_get_them_back(opened):
    buttons = opened.locator("th button").count()
    folded = opened.locator("section > details:not([open])").count()
    assert buttons > 20
    assert folded > 0
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")  # browsers repeat bare headings only
    assert opened.locator("th button").count() == 0
    assert opened.locator("section > details:not([open])").count() == 0
    assert "bytes per device" in texts(opened, "#layouts-table th")
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.locator("th button").count() == buttons
    assert opened.locator("section > details:not([open])").count() == folded


def test_a_table_that_is_too_wide_would_be_seen(opened):
    opened.add_style_tag(content="#layouts-table table { min-width: 1400px; }")
    assert _clipped(opened, 1280)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_paper(opened, scheme):
    opened.emulate_media(color_scheme=scheme)
    for selector in ("body", "small", "caption", "nav a", "td", ".verdict", "figcaption"):
        assert _contrast(opened, selector) >= 4.5, selector


PLAN = """{"kind": "plan", "version": 3,
"target": "h100:8", "hardware": "h100", "objective": "time",
"limit_bytes": 80000000000, "chosen": OPTION, "runners_up": [SECOND, THIRD],
"data_parallel": SECOND, "layouts": [["x", [["batch"]]], ["block/kernel", [[], ["model"]]]],
"inputs": ["x"], "batch": ["batch"], "why": [["ZeRO 1", ["a reason"]]]}"""
OPTION = """{"axes": [["batch", 4], ["model", 2]], "rules": [["batch", ["batch"]],
["block_0/attention/query.heads", ["model"]]], "zero": 1, "accumulate": 4, "remat": "block",
"time_s": 0.012345, "compute_s": 0.01, "communication_s": 0.002345, "peak_bytes": 45678901234,
"dry_run_time_s": 0.0231, "dry_run_peak_bytes": 51234567890}"""


@pytest.fixture
def planned(browser, tmp_path) -> Iterator[Any]:
    """The page of a plan with three alternatives."""
    second = OPTION.replace("0.0231", "0.0431").replace("5123", "3123")
    third = OPTION.replace("0.0231", "0.1431").replace("5123", "1123")
    text = PLAN.replace("OPTION", OPTION).replace("SECOND", second).replace("THIRD", third)
    (tmp_path / "plan.html").write_text(mw.Plan.from_json(text).to_html(), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "plan.html").as_uri())
    yield page
    assert complaints == []
    page.close()


def test_the_options_of_a_plan_sort_by_their_dry_runs(planned):
    first = "#plan-table tbody tr td:first-child"
    assert texts(planned, first) == ["chosen", "runner-up 1", "runner-up 2", "data parallel"]
    planned.locator("#plan-table th", has_text="peak").locator("button").click()
    falling = ["chosen", "runner-up 1", "data parallel", "runner-up 2"]
    assert texts(planned, first) == falling


@pytest.mark.parametrize("width", [320, 400, 768, 1100, 1150, 1280])
def test_the_options_of_a_plan_fit_every_width(planned, width):
    planned.set_viewport_size({"width": width, "height": 800})
    assert planned.evaluate("document.documentElement.scrollWidth") <= width
    assert _clipped(planned, width) == []


def test_the_options_of_a_plan_fit_on_paper(planned):
    planned.set_viewport_size({"width": A4_PIXELS, "height": 1000})
    planned.emulate_media(media="print")
    assert _clipped(planned, A4_PIXELS) == []


def _clipped(page: Any, width: int) -> list[str]:
    """The tables and cells that reach beyond the page, or hold more than they show."""
    return page.locator("table, td, th, figure, .bar, pre").evaluate_all(
        """(all, width) => all.filter(each => {
            const box = each.getBoundingClientRect();
            return box.width && (box.right > width + 1 || each.scrollWidth > each.clientWidth + 1)
                && !each.matches('.bar');
        }).map(each => each.outerHTML.slice(0, 120))""",
        width,
    )


def _contrast(page: Any, selector: str) -> float:
    """Of a text with what is behind it, as WCAG 2 defines it."""
    actual = page.locator(selector).first.evaluate(
        """each => {
            const ink = getComputedStyle(each).color;
            let at = each;
            while (at && getComputedStyle(at).backgroundColor === 'rgba(0, 0, 0, 0)')
                at = at.parentElement;
            const paper = at ? getComputedStyle(at).backgroundColor : 'rgb(255, 255, 255)';
            return [ink, paper].map(colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number));
        }"""
    )
    light, dark = sorted((_luminance(colour) for colour in actual), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(channels: list[float]) -> float:
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in channels)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_of_a_server_fits_wide_and_narrow_screens(browser, tmp_path):
    status = ModelStatus(
        "mnist",
        "<b>120</b>",
        True,
        bucket_batches={1: 3, 32: 12},
        latency_s=Histogram((0.001, 0.01, 0.1), (2, 40, 3, 0)),
        bytes_by_device={"cpu:0": 200704},
        weights=(Weight("hidden/kernel", "float32", (784, 128), (None, "model"), 200704),),
        mesh={"model": 2},
        answers={"answered": 45, "overloaded": 2},
    )
    spec = TensorSpec("image", "float32", (None, 28, 28))
    overview = Overview(True, (Served(status, (spec,), (spec,)),))
    (tmp_path / "server.html").write_text(view_of(overview, "page"))
    for width in (1280, 390):
        page = browser.new_page(viewport={"width": width, "height": 900})
        complaints: list[str] = []
        page.on("console", lambda message, heard=complaints: heard.append(message.text))
        page.goto((tmp_path / "server.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("section").count() == 6
        assert "<b>120</b>" in page.inner_text("#load")
        assert complaints == []
        page.close()
