"""Makes the subset of MNIST that is shipped: ``python tools/make_mnist_subset.py mnist.npz``.

Every class keeps its share, its digits are taken evenly spaced from the whole file, and the file's
order is kept, so that the same input gives the same bytes. Whole images stay as they are.
"""

from __future__ import annotations

import argparse
import io
import lzma
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parents[1] / "src" / "meshwright" / "digits" / "mnist_subset.npz.xz"
LIMIT_BYTES = 3_000_000
TEST_COUNT = 2_000
FIRST_TRY = 21_000  # a digit takes about 134 bytes
# Images of bytes: many literal bits from the byte before, none from the position.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


def stratified(labels: np.ndarray, count: int) -> np.ndarray:
    """Ascending indices of ``count`` digits, each class with its share (largest remainder)."""
    exact = np.bincount(labels, minlength=10) * count / len(labels)
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: count - shares.sum()]] += 1
    chosen = []
    for digit, share in enumerate(shares):
        (members,) = np.nonzero(labels == digit)
        chosen.append(members[((np.arange(share) + 0.5) * len(members) / share).astype(int)])
    return np.sort(np.concatenate(chosen))


def pack(arrays: dict[str, np.ndarray], train_count: int) -> bytes:
    """The bytes of the shipped file: an ``.npz`` inside ``.xz``."""
    parts = {}
    for part, count in (("train", train_count), ("test", TEST_COUNT)):
        rows = stratified(arrays[f"y_{part}"], count)
        parts |= {f"{kind}_{part}": arrays[f"{kind}_{part}"][rows] for kind in "xy"}
    plain = io.BytesIO()
    np.savez(plain, **parts)
    return lzma.compress(plain.getvalue(), check=lzma.CHECK_CRC32, filters=FILTERS)


def main() -> None:
    """Take as many training digits, in steps of 500, as fit."""
    parser = argparse.ArgumentParser(description="Makes the subset of MNIST that is shipped.")
    parser.add_argument("path", type=Path, help="the full mnist.npz of keras.datasets")
    with np.load(parser.parse_args().path) as archive:
        arrays = dict(archive)
    train_count = FIRST_TRY
    while len(packed := pack(arrays, train_count)) > LIMIT_BYTES:
        print(f"{train_count:,} + {TEST_COUNT:,} digits make {len(packed):,} bytes: too many.")
        train_count -= 500
    TARGET.write_bytes(packed)
    print(f"{train_count:,} + {TEST_COUNT:,} digits make {len(packed):,} bytes in {TARGET}.")


if __name__ == "__main__":
    main()
