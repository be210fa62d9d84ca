"""Lines of equal layers as one."""

from __future__ import annotations

import pytest

from meshwright.equal_layers import merged


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], []),
        (["one", "one"], ["one"]),
        ([f"block_{i}/k" for i in range(3)], ["block_0…2/k"]),
        ([f"block_{i}/k" for i in (10, 9, 11)], ["block_9…11/k"]),
        (["a.0.k", "a.1.k"], ["a.0,1.k"]),
        ([f"a/{i}/k" for i in (0, 2, 4, 6, 8, 10)], ["a/0,2,4,…,10/k"]),
        # A size or bytes are no numbers of a path, and are never a range.
        (["conv_0/k (8, 16)", "conv_1/k (8, 32)"], ["conv_0/k (8, 16)", "conv_1/k (8, 32)"]),
        (["k: 1.5 GiB", "k: 1.6 GiB", "k: 2 of 3"], ["k: 1.5 GiB", "k: 1.6 GiB", "k: 2 of 3"]),
        # Blocks in blocks, all of them or some.
        ([f"s{i}/b{j}/k" for i in range(3) for j in range(4)], ["s0…2/b0…3/k"]),
        (["s0/b0/k", "s0/b1/k", "s1/b0/k"], ["s0/b0,1/k", "s1/b0/k"]),
        # A path that is named twice.
        ([f"'h{i}/k' lies as 'h{i}/b'" for i in range(3)], ["'h0…2/k' lies as 'h0…2/b'"]),
        ([f"h{i}/k\n  and h{i}/b" for i in range(3)], ["h0…2/k\n  and h0…2/b"]),
    ],
)
def test_lines_that_differ_in_the_numbers_of_paths_are_one(lines, expected):
    assert merged(lines) == expected


def test_of_many_lines_each_number_is_kept():
    """What is merged says no more and no less than the lines: three blocks of which one lacks k."""
    lines = [f"block_{i}/{name}" for i in range(3) for name in "kb" if (i, name) != (1, "k")]
    assert merged(lines) == ["block_0,2/k", "block_0…2/b"]
