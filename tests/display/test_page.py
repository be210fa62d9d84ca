"""The report as one page: well formed, as full as the report, and safe from what it holds."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from pages import EVIL, MESH, bare, looped, page, report, rows_of, text

import meshwright as mw
from meshwright.cli import main
from meshwright.commands import planning as planning_commands
from meshwright.display.drawing.canvas import text_width
from meshwright.display.page.layouts import alike
from meshwright.display.page.memory import parts_of
from meshwright.display.page.pictures import mesh_picture
from meshwright.hlo import traffic
from meshwright.hlo.costs import LayerCost
from meshwright.hlo.traffic import Transfer
from meshwright.layouts.params import ParamInfo, Placed
from meshwright.planning import Target


@pytest.mark.full_for("floors", "loop", "report")
@pytest.mark.parametrize(
    "result",
    [
        report,
        looped,
        bare,
        lambda: bare(peak_bytes=1 << 40, available_bytes=1 << 34),
        lambda: replace(bare(), refusal=f"Used 40G of 16G {EVIL}"),
        lambda: replace(report(), axes=(("a", 2), ("b", 2), ("c", 2))),
    ],
    ids=["report", "loop", "bare", "too large", "refused", "floors"],
)
def test_it_is_well_formed_and_its_links_lead_somewhere(result):
    tree = page(result())
    ids = [element.get("id") for element in tree.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for element in tree.iter():
        if (link := element.get("href") or "").startswith("#"):
            assert link[1:] in ids
        if labelled := element.get("aria-labelledby"):
            assert labelled in ids
        for name in re.findall(r"url\(#([\w-]+)\)", " ".join(element.attrib.values())):
            assert name in ids


def test_it_asks_nothing_of_a_network_and_runs_its_own_script_alone():
    tree = page(report())
    for element in tree.iter():
        assert element.tag not in ("img", "iframe", "object")
        assert "src" not in element.attrib
        assert re.match("#|data:", element.get("href", "#"))
        assert not [key for key in element.attrib if key.startswith("on")]
    (script,) = tree.iter("script")
    digest = base64.b64encode(hashlib.sha256((script.text or "").encode()).digest()).decode()
    (policy,) = (meta.get("content") or "" for meta in tree.iter("meta") if meta.get("http-equiv"))
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    (style,) = tree.iter("style")
    assert not re.search(r"@import|url\((?!#)", style.text or "")


def test_the_same_report_gives_the_same_page():
    assert report().to_html() == replace(report()).to_html()


def test_it_is_saved_as_a_file(tmp_path):
    report().save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report().to_html()


def test_a_file_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path):
    with pytest.raises(
        mw.DataError, match=r"cannot write the report to .*: it is a folder. Choose"
    ):
        report().save(tmp_path)


JOB = """
import keras, numpy as np

def build():
    model = keras.Sequential([keras.Input([16]), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    return model, (np.zeros([16, 16]), np.zeros([16, 4]))
"""


def test_the_command_writes_it_beside_what_it_prints(tmp_path, monkeypatch):
    mw.create_mesh({"batch": 8})  # before the command can ask for one device alone
    (tmp_path / "job_of_a_page.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "job_of_a_page", raising=False)
    monkeypatch.setattr(planning_commands, "dry_run", lambda *_, **__: report())
    options = planning_commands.DryRunOptions(
        "job_of_a_page.py:build",
        Target.of("cpu:8"),
        mw.Mesh({"batch": 8}),
        layouts={},
        zero=None,
        batch_size=None,
        options={},
    )
    assert planning_commands.run(options, 60.0, Path("report.html")) is report()
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report().to_html()


@pytest.mark.parametrize("option", ["--html", "--save"])
def test_the_command_says_before_it_compiles_that_a_file_cannot_be_written(option, tmp_path):
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "page")
    command = ["dry-run", "json:build", "--target", "cpu:8", option, path]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert f"to '{path}': '{tmp_path / 'file'}' is not a folder. Choose another path." in words


@pytest.mark.full_for("loop")
@pytest.mark.parametrize("result", [report, looped], ids=["report", "loop"])
def test_every_number_of_the_terminal_is_in_the_page(result):
    visible = text(page(result()))
    numbers = re.findall(r"\d[\d,.]*(?: (?:[KMGT]?i?B|[mµ]?s|[kMGTP]?FLOP)\b|%)?", str(result()))
    assert len(numbers) > 40
    assert [number for number in numbers if number.rstrip(".,") not in visible] == []


def test_whatever_comes_from_the_user_is_escaped():
    info = ParamInfo(EVIL, (EVIL,), (4, 8), "float32", 4)
    placed = Placed(info, mw.Layout([None, "model"], MESH), EVIL)
    transfer = replace(report().unexpected[0], paths=(EVIL,), variables=(EVIL,), remedy=EVIL)
    result = replace(
        report(),
        name=EVIL,
        notes=(EVIL,),
        refusal=EVIL,
        placed=(placed, placed._replace(info=replace(info, path=f"{EVIL}2"))),
        collectives=(transfer,),
        tensors=tuple(replace(t, origin=replace(t.origin, path=EVIL)) for t in report().tensors),
    )
    assert len(list(page(result).iter("script"))) == 1
    assert text(page(result)).count(EVIL) > 6
    assert result.to_html().count("<script>") == 1


def test_lines_stand_beside_collectives_and_remedies_where_they_are_known():
    transfer = replace(report().unexpected[0], lines=("model.py:7", "model.py:9", "<b>.py:1"))
    tree = page(replace(report(), collectives=(transfer, *report().collectives)))
    columns = [text(cell) for cell in tree.iter("th")]
    assert "written in" in columns
    assert any(
        row[-1] == "model.py:7, model.py:9, <b>.py:1" for row in rows_of(tree, "collectives-table")
    )
    assert "Written in model.py:7, model.py:9 and 1 more." in text(tree)
    assert "written in" not in text(page(report()))


def test_a_layer_with_an_evil_name_is_shown_by_its_name():
    assert "<script>/kernel" in text(page(report()))
    assert "<b>net" in text(page(report()))
    assert "<b>net" not in report().to_html()


# Its parts


def test_what_fits_and_what_does_not_is_said_in_words():
    fits = text(page(bare(peak_bytes=2048, available_bytes=4096)))
    assert "Fits, with 2 KiB to spare" in fits
    assert "Does not fit, by 1 KiB" in text(page(bare(peak_bytes=5120, available_bytes=4096)))
    assert "Fit unknown: device memory not known" in text(page(bare(peak_bytes=5120)))


def test_the_parts_of_the_memory_add_up_to_the_peak():
    result = report()
    assert sum(part.size for part in parts_of(result.memory)) == result.peak_bytes
    rows = {row[0]: row[1] for row in rows_of(page(result), "memory-table")}
    assert rows["parameters"] == f"{result.parameter_bytes:,}"
    assert rows["peak"] == f"{result.peak_bytes:,}"


def test_collectives_nobody_asked_for_stand_out_with_their_remedy():
    assert report().unexpected
    tree = page(report())
    marked = [row for row in tree.iter("tr") if row.get("class") == "marked"]
    assert marked
    assert all("! unexpected" in text(row) for row in marked)
    assert all(collective.remedy in text(tree) for collective in report().unexpected)


def test_the_collectives_of_the_table_are_all_there_are():
    result = looped()
    rows = rows_of(page(result), "collectives-table")
    assert sum(int(row[5].replace(",", "")) for row in rows) == sum(
        collective.count for collective in result.collectives
    )


def test_layers_are_those_of_the_estimate():
    result = report().estimate
    rows = rows_of(page(report()), "layers-table")
    assert [row[0] for row in rows] == [layer.layer or "-" for layer in result.layers]


def test_collectives_and_flops_of_equal_layers_share_a_row():
    def summed(path, nbytes):
        return Transfer("all-reduce", ("batch",), nbytes, 1, (path,), ("backward",), ("float32",))

    moved = [summed(f"block_{n}/up_1", 64) for n in range(24)] + [summed("block_24/up_1", 32)]
    rows = [(row.places, row.count, row.nbytes) for row in traffic.alike(moved)]
    assert rows == [(("block_*/up_1",), 24, 24 * 64), (("block_24/up_1",), 1, 32)]
    layers = [LayerCost(f"block_{n}", 1e9, 2e9, 0.0, 0.0, 10 + n) for n in range(24)]
    layers.append(LayerCost("head", 5e9, 0.0, 0.0, 0.0, 7))
    result = replace(report(), collectives=tuple(moved))
    result = replace(result, estimate=replace(result.estimate, layers=tuple(layers)))
    tree = page(result)
    assert [row[:3] for row in rows_of(tree, "layers-table")] == [
        ["block_*" + ", ".join(layer.layer for layer in layers[:-1]), "24 ×", "72 GFLOP"],
        ["head", "1 ×", "5 GFLOP"],
    ]
    first, last = rows_of(tree, "collectives-table")
    assert (first[2].startswith("block_*/up_1 (24 alike)"), first[5]) == (True, "24")
    assert (last[2], last[5]) == ("block_24/up_1", "1")
    assert re.search(r"all-reduce +batch +24 +1\.5 KiB +backward +block_\*/up_1", str(result))


def test_numbers_sort_by_what_they_are_and_not_by_how_they_look():
    tree = page(report())
    cells = [cell for cell in tree.iter("td") if cell.get("data-of") == "bytes per device"]
    keys = [float(cell.get("data-v") or "nan") for cell in cells]
    assert len(keys) > 5
    assert all(key >= 0 for key in keys)


def test_variables_of_equal_blocks_share_a_row():
    def placed(path, specs):
        info = ParamInfo(path, (path,), (8, 8), "float32", 4)
        return Placed(info, mw.Layout(specs, MESH), f"rule {path!r}")

    split = [placed(f"block_{n}/up_1", [None, "model"]) for n in range(24)]
    whole = [placed("block_3/up_1", [None, None])]
    result = alike([*split, *whole])
    assert [(group.pattern, len(group.members)) for group in result] == [
        ("block_*/up_1", 24),
        ("block_3/up_1", 1),
    ]
    assert result[0].bytes_per_device == 24 * 8 * 8 * 4 // 2
    visible = text(page(replace(report(), placed=(*split, *whole))))
    assert all(variable.info.path in visible for variable in split)  # where a search finds them


# Large ones


@pytest.mark.parametrize(
    "axes",
    [
        {"x": 1},
        {"batch": 512},
        {"batch": 64, "model": 8},
        {"replica": 8, "batch": 8, "model": 8},
        {"a": 2, "b": 4, "c": 8, "d": 8},
        {"batch": 256, "model": 24},
    ],
    ids=str,
)
def test_meshes_of_any_size_are_drawn_in_a_picture_of_one_size(axes):
    tree = ElementTree.fromstring(mesh_picture(mw.Mesh(axes)))
    assert float(tree.get("width") or 0) < 480
    assert float(tree.get("height") or 0) < 400
    words = text(tree)
    assert all(f"{axis} = {size}" in words for axis, size in axes.items())
    texts = [element.text or "" for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    numbers = [int(n) for text in texts if re.fullmatch(r"[\d–]+", text) for n in text.split("–")]
    assert min(numbers) == 0
    assert max(numbers) < math.prod(axes.values())
    assert len(numbers) == len(set(numbers))


def test_long_names_of_axes_make_the_picture_wider_and_are_not_cut():
    axes = {"replicas": 2, "rows_of_the_batch_in_a_host": 4, "a_model_axis_of_a_very_long_name": 2}
    tree = ElementTree.fromstring(mesh_picture(mw.Mesh(axes)))
    for element in tree.iter("{http://www.w3.org/2000/svg}text"):
        if not element.get("transform") and element.get("text-anchor") is None:
            end = float(element.get("x") or 0) + text_width(element.text or "", 13)
            assert end < float(tree.get("width") or 0)


def test_a_report_of_24_blocks_on_512_devices_stays_small_and_is_made_at_once():
    mesh = mw.Mesh({"replica": 8, "batch": 8, "model": 8})
    ways = [[None, "model"], ["model", None], [("replica", "batch"), "model"], ["batch", "model"]]
    ways += [[("model", "replica"), "batch"], [None, ("batch", "model")], [None, None]]
    placed = []
    for block in range(24):
        for number in range(48):
            path = f"block_{block}/part_{'abcdefgh'[number % 8]}{'xyzuvw'[number // 8]}/kernel"
            info = ParamInfo(path, (path,), (4096, 4096), "float32", 4)
            placed.append(Placed(info, mw.Layout(ways[number % 7], mesh), "rule"))
    result = replace(
        report(),
        axes=mesh.axes,
        placed=tuple(placed),
        collectives=tuple(
            replace(collective, variables=(f"block_{block}/{number}/kernel",))
            for block in range(24)
            for number, collective in enumerate(report().collectives)
        ),
    )
    begin = time.process_time()
    html = result.to_html()
    assert time.process_time() - begin < 1.0
    assert len(html.encode()) < 1_000_000
    ElementTree.fromstring(html)


# Layers in layers


def boxes(tree) -> list[ElementTree.Element]:
    return [element for element in tree.iter("details") if element.get("class") == "box"]


def test_layers_open_to_their_arrays_and_to_what_is_inside_of_them():
    tree = ElementTree.fromstring(report().to_html())
    (w,) = [box for box in boxes(tree) if text(next(box.iter("b"))) == "w"]
    assert "kernel float32 16 × 32 [unsharded, model]" in text(w)
    assert "3 KiB of state" in summary(w)  # 1 KiB, and as much in each of its slots
    share = sum(float(s) for s in re.findall(r"([\d.]+)%", " ".join(map(summary, boxes(tree)))))
    assert share == pytest.approx(100, abs=1)  # of a model without layers in layers


def summary(box: ElementTree.Element) -> str:
    (first, *_) = box.iter("summary")
    return text(first)


def test_equal_layers_are_one_box():
    tree = ElementTree.fromstring(looped().to_html())
    names = [summary(box) for box in boxes(tree)]
    assert len(names) == len(set(names))
    assert 'id="boxes"' not in bare().to_html()


@pytest.mark.parametrize(
    ("waiting_s", "talk", "sentence"),
    [
        (0.03, ((("batch",), 0.05),), "30.0% of it is waiting for collectives."),
        (0.0, ((("batch",), 0.05),), "collectives hide behind other work."),
        (0.0, (), "it has no collectives."),
    ],
)
def test_a_sentence_over_the_time_line_says_what_the_time_goes_to(waiting_s, talk, sentence):
    known = {"step_time_s": 0.1, "bound_by": "compute", "waiting_s": waiting_s}
    run = replace(report(), estimate=replace(report().estimate, communication_s=talk, **known))
    visible = text(page(run))
    assert f"Most of the 100 ms of a step goes to compute; {sentence}" in visible
