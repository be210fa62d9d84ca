"""Makes ``docs/pictures/report_*.png``: parts of the pages of a dry run and of a plan.

    make .venv/.installed-targets
    .venv/bin/python tools/report_pictures.py

Needs the TPU compiler, Playwright and a Chromium, of which ``CHROMIUM`` is the path.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
from playwright.sync_api import Page, sync_playwright

import meshwright as mw

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
WIDTH = 1120


def transformer(width: int, blocks: int, words: int) -> Any:
    """A small language model; its feed-forward part is split by halves."""
    import keras
    from keras import layers

    x = inputs = keras.Input([64], dtype="int32")
    x = layers.Embedding(words, width, name="embedding")(x)
    for number in range(blocks):
        name = f"block_{number}"
        normed = layers.LayerNormalization(name=f"{name}_norm")(x)
        x = x + layers.MultiHeadAttention(8, width // 8, name=f"{name}_attention")(normed, normed)
        hidden = layers.Dense(4 * width, activation="gelu", name=f"{name}_up")(x)
        x = x + layers.Dense(width, name=f"{name}_down")(hidden)
    model = keras.Model(inputs, layers.Dense(words, name="out")(x), name="transformer")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def pages(folder: Path) -> None:
    """Save the pages of a dry run and of a plan."""
    import keras  # after Meshwright, which settles its backend
    from keras import layers

    with mw.abstract():
        model = transformer(512, 4, 32_000)
        large = keras.Sequential([keras.Input([1024]), layers.Dense(1 << 20, name="up")])
        large.add(layers.Dense(1024, name="down"))
        large.compile("adam", "mse")
    split = {".*_up/kernel": [None, "model"], ".*_(up|down)/bias": ["model"]}
    strategy = mw.Sharded(mw.Mesh({"batch": 4, "model": 4}), split, zero=1)
    ids = jax.ShapeDtypeStruct((256, 64), "int32")
    mw.dry_run(model, (ids, ids), strategy=strategy, target="v5e:4x4").save(folder / "report.html")
    rows = jax.ShapeDtypeStruct((256, 1024), "float32")
    plan = mw.plan(large, (rows, rows), target="h100:8")
    (folder / "plan.html").write_text(plan.to_html(), encoding="utf-8")


def picture(page: Page, name: str, selector: str, height: int, margin: int = 20) -> None:
    """Save what begins at an element, ``height`` pixels of it at most."""
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    top = max(0.0, box["y"] - margin)
    clip = {"x": 0, "y": top, "width": WIDTH, "height": min(height, box["height"] + 2 * margin)}
    page.screenshot(path=PICTURES / f"report_{name}.png", clip=clip, full_page=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as made, sync_playwright() as started:
        pages(Path(made))
        own = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = started.chromium.launch(executable_path=own, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto((Path(made) / "report.html").as_uri())
        picture(page, "head", "body", 860, margin=0)
        picture(page, "collectives", "#collectives", 760)
        picture(page, "time", "#time", 520)
        page.goto((Path(made) / "plan.html").as_uri())
        picture(page, "plan", "#plan", 900)
        browser.close()


if __name__ == "__main__":
    main()
