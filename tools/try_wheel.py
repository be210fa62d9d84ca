"""Tries a release where its wheel is installed: ``python tools/try_wheel.py WHEEL SDIST``.

`make release` runs it in a fresh environment; the sources must not be on the path.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from importlib.metadata import metadata, version
from pathlib import Path

import meshwright as mw

IN_WHEEL = ("py.typed", "digits/mnist_subset.npz.xz", "targets/chips.toml")
IN_SDIST = (
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
    "zensical.toml",
    "docs/index.md",
    "tests/test_docs.py",
)


def main(wheel: str, sdist: str) -> None:
    """Look into both files, then train with what the wheel has installed."""
    assert "site-packages" in mw.__file__, f"{mw.__file__} is not the wheel's"
    assert mw.__version__ == version("meshwright") == Path(wheel).name.split("-")[1]
    names = zipfile.ZipFile(wheel).namelist()
    assert [one for one in IN_WHEEL if f"meshwright/{one}" not in names] == []
    assert [one for one in names if not one.startswith("meshwright")] == []
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert [one for one in IN_SDIST if one not in inside] == []
    description = metadata("meshwright").json["description"]
    assert "# Meshwright" in description
    assert "](docs/" not in description, "a relative link in the description"
    _train()
    print(f"Meshwright {mw.__version__}: wheel and sdist are complete, and the wheel trains.")


def _train() -> None:
    import numpy as np

    mw.virtual_devices(4)
    import keras

    strategy = mw.Sharded(
        mw.create_mesh({"batch": 2, "model": 2}), {"hidden/kernel": [None, "model"]}
    )
    with strategy.scope():
        hidden = keras.layers.Dense(8, name="hidden")
        model = keras.Sequential([keras.Input([4]), hidden, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    strategy.fit(model, np.ones([8, 4]), np.ones([8, 1]), batch_size=4, verbose=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
