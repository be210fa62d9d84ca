"""Convolution by name, with every dim split: values and gradients are those of a loop in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_laws import Case, check, under_each_kind

import meshwright as mw
import meshwright.named as mn
from meshwright import errors
from meshwright.hlo.collectives import read_collectives
from meshwright.named import convolution as c

Pads = Sequence[tuple[int, int]]


def looped(
    x: Any, kernel: Any, sums: str, pads: Pads, strides: Sequence[int], dilation: Sequence[int]
) -> Any:
    """Convolution of [batch, spatial..., ...] with [spatial..., ...], tap by tap.

    ``pads`` are rows of zeros; ``sums`` says for einsum what each tap does to the rows it meets.
    """
    x = np.pad(x, [(0, 0), *pads, *[(0, 0)] * (x.ndim - 1 - len(pads))])
    result: Any = 0
    for tap in np.ndindex(kernel.shape[: len(pads)]):
        rows = [
            slice(t * d, x.shape[1 + i] - (kernel.shape[i] - 1 - t) * d, s)
            for i, (t, s, d) in enumerate(zip(tap, strides, dilation, strict=True))
        ]
        result = result + np.einsum(sums, x[(slice(None), *rows)], kernel[tap])
    return result


def laid_down(
    x: Any, kernel: Any, sums: str, cuts: Pads, strides: Sequence[int], dilation: Sequence[int]
) -> Any:
    """Transposed convolution: each element lays the kernel down; then rows are cut off the ends."""
    number = len(cuts)
    sizes = [
        (x.shape[1 + i] - 1) * strides[i] + (kernel.shape[i] - 1) * dilation[i] + 1
        for i in range(number)
    ]
    result: Any = 0
    for tap in np.ndindex(kernel.shape[:number]):
        one = np.einsum(sums, x, kernel[tap])
        whole = np.zeros([one.shape[0], *sizes, *one.shape[1 + number :]], x.dtype)
        rows = [
            slice(t * d, t * d + (one.shape[1 + i] - 1) * s + 1, s)
            for i, (t, s, d) in enumerate(zip(tap, strides, dilation, strict=True))
        ]
        whole[(slice(None), *rows)] = one
        result = result + whole
    cut = tuple(slice(low, size - high) for (low, high), size in zip(cuts, sizes, strict=True))
    return result[(slice(None), *cut)]


IMAGE, KERNEL = "batch:8 h:16 w:8 io:8", "fh:3 fw:2 io:8 hidden:8"
TWO = "bhwi,io->bhwo"


def image(
    name: str,
    split: str,
    pads: Pads,
    strides: Sequence[int] = (1, 1),
    dilation: Sequence[int] = (1, 1),
    padding: Any = "SAME",
    dims: Sequence[str] = (IMAGE, KERNEL),
    is_transposed: bool = False,
    **how: Any,
) -> Case:
    """A convolution of images; ``pads`` are worked out by hand."""
    conv, oracle = (c.conv2d_transposed, laid_down) if is_transposed else (c.conv2d, looped)
    return Case(
        f"{name}, {split}".removesuffix(", "),
        lambda x, k: conv(x, k, "h:fh w:fw", strides=strides, dilation=dilation, padding=padding),
        lambda x, k: oracle(x, k, TWO, pads, strides, dilation),
        dims,
        split.split(),
        slopes=(0, 1),
        **how,
    )


# Each line: what is special, the dims that are split (the first on 1-D meshes, and so on).
IMAGES = [
    image("same", "h io batch", [(1, 1), (0, 1)]),
    image("same", "batch h hidden", [(1, 1), (0, 1)]),
    image("same", "io hidden h", [(1, 1), (0, 1)]),
    image("strides", "h w io", [(0, 1), (0, 0)], (2, 1), padding="SAME",
          dims=(IMAGE, "fh:3 fw:1 io:8 hidden:8")),
    image("dilation", "w h hidden", [(4, 4), (1, 2)], (1, 1), (4, 3)),
    image("even windows, pairs", "h hidden w", [(2, 1), (3, 0)], padding=[(2, 1), (3, 0)],
          dims=(IMAGE, "fh:4 fw:4 io:8 hidden:8")),
    image("valid", "h w io", [(0, 0), (0, 0)], padding="VALID",
          dims=("batch:2 h:16 w:8 io:8", "fh:9 fw:5 io:8 hidden:2")),
    image("valid, strides", "h batch hidden", [(0, 0), (1, 1)], (2, 1),
          padding={"h": "VALID", "w": 1}, dims=(IMAGE, "fh:2 fw:3 io:8 hidden:8")),
    image("strides over dilation", "h io w", [(0, 3), (0, 0)], (2, 2), (2, 1), [(0, 3), "VALID"],
          dims=(IMAGE, "fh:3 fw:2 io:8 hidden:2")),
    image("kernel's own dims", "fh h fw", [(3, 4), (0, 1)],
          dims=(IMAGE, "fh:8 fw:2 io:8 hidden:2")),
    image("kernel's own dims", "h fh io", [(3, 3), (0, 1)], (1, 1), (2, 1),
          dims=(IMAGE, "fh:4 fw:2 io:8 hidden:2")),
]  # fmt: skip

OTHERS = [
    Case("causal", lambda x, k: c.conv1d(x, k, "t:taps", dilation=4, padding=[(8, 0)]),
         lambda x, k: looped(x, k, "bti,io->bto", [(8, 0)], [1], [4]),
         ("batch:8 t:16 io:8", "taps:3 io:8 hidden:8"), ("t", "io", "hidden"), slopes=(0, 1)),
    Case("rows of every device", lambda x, k: c.conv1d(x, k, "t:taps"),
         lambda x, k: looped(x, k, "bti,io->bto", [(7, 8)], [1], [1]),
         ("batch:2 t:8 io:8", "taps:16 io:8 hidden:2"), ("t", "taps", "io"), slopes=(0, 1),
         gathers="a window reaches over the whole dim"),
    Case("volumes",
         lambda x, k: c.conv3d(x, k, {"d": "fd", "h": "fh", "w": "fw"}, strides="d:1 h:2"),
         lambda x, k: looped(x, k, "bdhwi,io->bdhwo", [(1, 1), (0, 1), (0, 1)], [1, 2, 1], [1] * 3),
         ("batch:2 d:8 h:4 w:4 io:4", "fd:3 fh:3 fw:2 io:4 hidden:2"), ("d", "h", "io"),
         slopes=(0, 1)),
    Case("channels first, batch dims apart", lambda x, k: c.conv2d(x, k, "h:fh w:fw"),
         lambda x, k: looped(x.transpose(0, 4, 5, 2, 3, 1).reshape(32, 8, 4, 4),
                             k.transpose(1, 2, 3, 0), TWO, [(1, 1), (1, 1)], [1, 1], [1, 1])
         .reshape(2, 4, 4, 8, 4, 3).transpose(0, 5, 3, 4, 1, 2),
         ("a:2 io:4 h:8 w:4 b:4 c:4", "hidden:3 fh:3 fw:3 io:4"), ("h", "b", "a"), slopes=(0, 1)),
    Case("two input dims, two output dims", lambda x, k: c.conv1d(x, k, "t:taps"),
         lambda x, k: looped(x, k, "btij,ijop->btop", [(1, 1)], [1], [1]),
         ("batch:4 t:8 i:2 j:4", "taps:3 i:2 j:4 o:2 p:4"), ("t", "j", "o"), slopes=(0, 1)),
    Case("groups", lambda x, k: c.conv2d(x, k, "h:fh w:fw", reduce="io"),
         lambda x, k: looped(x, k, "bhwgi,gio->bhwgo", [(1, 1), (0, 1)], [1, 1], [1, 1]),
         ("batch:8 h:8 w:4 groups:8 io:4", "fh:3 fw:2 groups:8 io:4 hidden:2"),
         ("groups", "h", "batch"), slopes=(0, 1)),
    Case("groups, another order", lambda x, k: c.conv2d(x, k, "h:fh w:fw", reduce="io"),
         lambda x, k: looped(x, k.transpose(1, 2, 4, 3, 0), "bhwig,gio->bhwog",
                             [(1, 1), (0, 1)], [1, 1], [1, 1]),
         ("batch:8 h:8 w:4 io:4 groups:8", "hidden:2 fh:3 fw:2 io:4 groups:8"),
         ("batch", "io", "h"), slopes=(0, 1)),
    Case("no channels", lambda x, k: c.conv2d(x, k, "h:fh w:fw", reduce=()),
         lambda x, k: looped(x, k, "bhwi,->bhwi", [(1, 1), (0, 1)], [1, 1], [1, 1]),
         ("batch:2 h:16 w:8 io:2", "fh:3 fw:2"), ("h", "w", "io"), slopes=(0, 1)),
    Case("depthwise", lambda x, k: c.depthwise_conv(x, k, "h:fh w:fw", strides=2),
         lambda x, k: looped(x, k, "bhwi,i->bhwi", [(0, 1), (0, 0)], [2, 2], [1, 1]),
         ("batch:8 h:16 w:8 io:8", "fh:3 fw:2 io:8"), ("h", "io", "batch"), slopes=(0, 1)),
    Case("depthwise with a multiplier", lambda x, k: c.depthwise_conv(x, k, "t:taps"),
         lambda x, k: looped(x, k, "bti,im->btim", [(1, 1)], [1], [1]),
         ("batch:8 t:8 io:8", "taps:3 io:8 times:2"), ("batch", "t", "times"), slopes=(0, 1)),
    Case("separable", lambda x, k, p: c.separable_conv(x, k, p, "h:fh w:fw"),
         lambda x, k, p: np.einsum("bhwim,imo->bhwo", looped(
             x, k, "bhwi,im->bhwim", [(1, 1), (0, 1)], [1, 1], [1, 1]), p),
         ("batch:4 h:8 w:4 io:4", "fh:3 fw:2 io:4 times:2", "io:4 times:2 hidden:4"),
         ("h", "io", "hidden"), slopes=(0, 1, 2)),
]  # fmt: skip


def transposed(
    name: str,
    split: str,
    cuts: Pads,
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: Any,
    kernel: str,
    x: str = "batch:8 h:8 w:4 io:4",
) -> Case:
    name, dims = f"transposed {name}", (x, kernel)
    return image(name, split, cuts, strides, dilation, padding, dims, is_transposed=True)


TRANSPOSED = [
    transposed("same", "h io w", [(0, 1), (1, 1)], (2, 2), (1, 1), "SAME",
               "fh:3 fw:4 io:4 hidden:4"),
    transposed("same, dilated", "h hidden batch", [(1, 2), (1, 1)], (2, 1), (2, 1), "SAME",
               "fh:3 fw:3 io:4 hidden:4"),
    transposed("valid", "h w hidden", [(0, 0), (0, 0)], (2, 3), (1, 1), "VALID",
               "fh:2 fw:3 io:4 hidden:4"),
    transposed("pairs", "batch h fh", [(1, 3), (2, 0)], (2, 1), (1, 1), [(1, 3), (2, 0)],
               "fh:6 fw:3 io:4 hidden:4"),
    transposed("kernel's own dims", "fh h io", [(1, 3), (0, 0)], (4, 1), (1, 1), [(1, 3), 0],
               "fh:8 fw:1 io:4 hidden:2"),
]  # fmt: skip
UNLIKE = Case(
    "transposed 1d, rows that begin unlike",
    lambda x, k: c.conv1d_transposed(x, k, "t:taps", strides=2, padding="VALID"),
    lambda x, k: laid_down(x, k, "bti,io->bto", [(0, 0)], [2], [1]),
    ("batch:8 t:8 io:4", "taps:4 io:4 hidden:4"), ("batch", "t", "io"), slopes=(0, 1),
    gathers="a device's results do not begin with a row of its own",
)  # fmt: skip
VOLUMES = Case(
    "transposed 3d", lambda x, k: c.conv3d_transposed(x, k, "d:fd h:fh w:fw", strides=2),
    lambda x, k: laid_down(x, k, "bdhwi,io->bdhwo", [(0, 0), (0, 1), (0, 0)], [2, 2, 2], [1, 1, 1]),
    ("batch:2 d:8 h:4 w:2 io:2", "fd:2 fh:3 fw:2 io:2 hidden:2"), ("d", "h", "w"), slopes=(0, 1),
)  # fmt: skip

CASES = [*IMAGES, *OTHERS, *TRANSPOSED, UNLIKE, VOLUMES]
FEW = {str(case) for case in (IMAGES[0], IMAGES[3], OTHERS[1], TRANSPOSED[0])}


@pytest.mark.full_for("valid, h w io-3-D")
@pytest.mark.parametrize(
    ("case", "kind"), [row for case in CASES for row in under_each_kind(case, FEW)]
)
def test_laws(case: Case, kind: str) -> None:
    check(case, kind)


# Every combination of split dims


def combined(case: Case, dims: str) -> Iterator[tuple[Case, str]]:
    """The case with each of ``dims`` split, each two, each three; and with axes left over."""
    names = dims.split()
    for name in names:
        yield replace(case, name=f"{case}, {name}", split=(name,)), "1-D"
        yield replace(case, name=f"{case}, {name}", split=(name,)), "3-D"
    for two in itertools.permutations(names, 2):
        yield replace(case, name=f"{case}, {' '.join(two)}", split=two), "2-D"
    for three in itertools.combinations(names, 3):
        yield replace(case, name=f"{case}, {' '.join(three)}", split=three), "3-D"


WIDE = ("batch:8 h:16 w:16 io:8", "fh:2 fw:8 io:8 hidden:8")
COMBINED = [
    *combined(image("same", "", [(1, 2), (3, 3)], (1, 1), (1, 2),
                    dims=("batch:8 h:8 w:16 io:8", "fh:4 fw:4 io:8 hidden:8")),
              "batch h w io hidden"),
    *combined(image("strides", "", [(0, 0), (3, 4)], (2, 1), padding=["VALID", "SAME"], dims=WIDE),
              "batch h w fw io hidden"),
    *combined(Case("groups", lambda x, k: c.conv1d(x, k, "t:taps", reduce="io"),
                   lambda x, k: looped(x, k, "btgi,gio->btgo", [(1, 1)], [1], [1]),
                   ("batch:8 t:8 groups:8 io:8", "taps:3 groups:8 io:8 hidden:8"), (),
                   slopes=(0, 1)),
              "batch t groups io hidden"),
    *combined(transposed("2", "", [(0, 1), (1, 1)], (2, 1), (1, 1), "SAME",
                         "fh:3 fw:3 io:8 hidden:8", x="batch:8 h:8 w:8 io:8"),
              "batch h w io hidden"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("case", "kind"), COMBINED, ids=str)
def test_every_combination_of_split_dims(case: Case, kind: str) -> None:
    check(case, kind)


# What devices say to each other

IMAGE_3, KERNEL_3 = "batch:8 h:16 w:8 io:8", "fh:3 fw:3 io:8 hidden:8"


def moved(
    rules: str, axes: dict[str, int], backwards: bool
) -> list[tuple[str, tuple[str, ...], Any]]:
    """Every collective of a convolution by 3 x 3, or of its gradient: kind, axes, sizes."""
    with mn.rules(rules, mw.create_mesh(axes)):
        x = mn.named(jnp.ones([8, 16, 8, 8]), IMAGE_3)
        kernel = mn.named(jnp.ones([3, 3, 8, 8]), KERNEL_3)

        def forward(both: Any) -> Any:
            return c.conv2d(*both, "h:fh w:fw")

        gradient = jax.grad(lambda both: jnp.sum(jnp.sin(forward(both).array)))
        function = jax.jit(gradient if backwards else forward)
        text = function.lower((x, kernel)).compile().as_text()
    collectives = read_collectives(text or "", tuple(axes.items()))
    return sorted(
        (collective.kind, collective.axes, array.dims)
        for collective in collectives
        for array in collective.arrays
    )


def edges(axis: str, *sizes: int) -> list[Any]:
    """Two exchanges, up and down, of so large an edge."""
    return [("collective-permute", (axis,), sizes)] * 2


def test_rows_exchange_their_edges_alone() -> None:
    assert moved("h:all", {"all": 8}, backwards=False) == edges("all", 8, 1, 8, 8)
    kernel = ("all-reduce", ("all",), (3, 3, 8, 8))
    assert moved("h:all", {"all": 8}, backwards=True) == [kernel, *edges("all", 8, 1, 8, 8) * 2]


def test_a_split_of_three_kinds_moves_what_the_mathematics_asks_for() -> None:
    axes = {"rows": 2, "cols": 2, "planes": 2}
    forward = [("all-reduce", ("planes",), (4, 8, 8, 8)), *edges("cols", 4, 1, 8, 4)]
    assert moved("batch:rows;h:cols;io:planes", axes, backwards=False) == forward
    kernel = ("all-reduce", ("rows", "cols"), (3, 3, 4, 8))
    assert moved("batch:rows;h:cols;io:planes", axes, backwards=True) == sorted(
        [*forward, kernel, *edges("cols", 4, 1, 8, 4)]
    )


def test_gradients_of_pieces_are_summed_without_their_edges() -> None:
    result = moved("h:rows;hidden:cols", {"rows": 4, "cols": 2}, backwards=True)
    image, kernel = ("cols", (8, 4, 8, 8)), ("rows", (3, 3, 8, 4))
    assert [collective for collective in result if collective[0] == "all-reduce"] == [
        ("all-reduce", (axis,), sizes) for axis, sizes in (image, kernel)
    ]


def test_corners_come_along() -> None:
    result = moved("h:rows;w:cols", {"rows": 4, "cols": 2}, backwards=False)
    assert result == [*edges("cols", 8, 6, 1, 8), *edges("rows", 8, 1, 4, 8)]


# Other laws


@pytest.mark.parametrize("padding", ["SAME", "VALID", 1, [(0, 2)]])
@pytest.mark.parametrize(("size", "taps", "stride", "dilation"), [
    (8, 3, 2, 1), (9, 4, 2, 1), (7, 3, 1, 2), (5, 2, 3, 1), (6, 4, 3, 2), (4, 1, 2, 1),
])  # fmt: skip
def test_transposed_is_the_adjoint(
    padding: Any, size: int, taps: int, stride: int, dilation: int
) -> None:
    random = np.random.default_rng(0)
    how = {"strides": stride, "dilation": dilation, "padding": padding}
    x = mn.named(random.normal(size=[2, size, 3]), f"batch:2 t:{size} hidden:3")
    kernel = mn.named(random.normal(size=[taps, 5, 3]), f"taps:{taps} io:5 hidden:3")
    back = c.conv_transposed(x, kernel, "t:taps", **how)
    y = mn.named(random.normal(size=back.array.shape), back.dims)
    there = c.conv(y, kernel, "t:taps", **how)
    assert there.dims == x.dims
    np.testing.assert_allclose(
        np.sum(np.asarray(there) * np.asarray(x)),
        np.sum(np.asarray(y) * np.asarray(back)),
        rtol=2e-4,
    )


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_is_what_xla_calls_same(stride: int) -> None:
    random = np.random.default_rng(0)
    for size, taps in itertools.product([5, 6], [1, 2, 3, 4]):
        x, kernel = random.normal(size=[1, size, 2]), random.normal(size=[taps, 2, 2])
        x, kernel = jnp.asarray(x, "float32"), jnp.asarray(kernel, "float32")
        expected = jax.lax.conv_general_dilated(
            x, kernel, [stride], "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        operands = mn.named(x, f"b:1 t:{size} io:2"), mn.named(kernel, f"taps:{taps} io:2 o:2")
        result = c.conv1d(*operands, "t:taps", strides=stride)
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5, atol=1e-6)


def pair() -> tuple[mn.NamedArray, mn.NamedArray]:
    random = np.random.default_rng(0)
    x = mn.named(random.normal(size=[4, 8, 2]).astype("float32"), "batch:4 t:8 io:2")
    return x, mn.named(random.normal(size=[3, 2, 4]).astype("float32"), "taps:3 io:2 hidden:4")


def test_result_dims_stand_where_the_operands_had_them() -> None:
    x, kernel = pair()
    windows = {x.dim("t"): kernel.dim("taps")}  # dims will do for their names
    assert c.conv(x, kernel, windows).dims == mn.as_dims("batch:4 t:8 hidden:4")
    first = mn.named(jnp.ones([2, 8, 4]), "io:2 t:8 batch:4")
    assert c.conv(first, kernel, "t:taps").dims == mn.as_dims("hidden:4 t:8 batch:4")
    times = mn.named(jnp.ones([2, 3, 5]), "io:2 taps:3 times:5")
    result = c.depthwise_conv(first, times, "t:taps", padding="VALID")
    assert result.dims == mn.as_dims("io:2 t:6 batch:4 times:5")


def test_without_windows_it_is_a_product() -> None:
    x, _ = pair()
    w = mn.named(jnp.arange(6.0).reshape(2, 3), "io:2 hidden:3")
    result = c.conv(x, w, "")
    np.testing.assert_allclose(np.asarray(result), np.asarray(mn.einsum([x, w])), rtol=1e-6)


def test_element_types() -> None:
    x, kernel = pair()
    short, wide = mn.cast(x, "bfloat16"), c.conv(x, kernel, "t:taps")
    assert c.conv(short, kernel, "t:taps").dtype == jnp.float32
    assert c.conv(short, mn.cast(kernel, "bfloat16"), "t:taps").dtype == jnp.bfloat16
    exact = c.conv(short, mn.cast(kernel, "bfloat16"), "t:taps", dtype="float32")
    assert exact.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(exact), np.asarray(wide), atol=0.1)


def test_inside_vmap_scan_and_remat() -> None:
    x, kernel = pair()
    expected = np.asarray(c.conv(x, kernel, "t:taps"))
    with mn.rules("t:all", mw.create_mesh({"all": 8})):
        many = mn.named(jnp.stack([x.array] * 2), "many:2 batch:4 t:8 io:2")
        y = jax.jit(jax.vmap(lambda one: c.conv(one, kernel, "t:taps")))(many)
        np.testing.assert_allclose(y.array[1], expected, rtol=1e-4, atol=1e-5)
        body = jax.checkpoint(
            lambda total, one: (total + jnp.sum(c.conv(one, kernel, "t:taps").array), ())
        )
        total, _ = jax.jit(lambda many: jax.lax.scan(body, 0.0, many))(many)
        np.testing.assert_allclose(total, 2 * expected.sum(), rtol=1e-4)


def test_a_gradient_without_jit_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    x, kernel = pair()
    gradient = jax.grad(lambda x: jnp.sum(c.conv(x, kernel, "t:taps", dilation=2).array))
    with mn.rules("t:all", mw.create_mesh({"all": 8})), jax.log_compiles():
        gradient(x)
        assert "Compiling" in caplog.text
        caplog.clear()
        gradient(x)
        assert "Compiling" not in caplog.text


def test_on_an_abstract_mesh_rules_are_checked_and_nothing_is_laid_out() -> None:
    x, kernel = pair()
    expected = np.asarray(c.conv(x, kernel, "t:taps"))
    with mn.rules("t:all", mw.Mesh({"all": 4})):
        np.testing.assert_array_equal(np.asarray(c.conv(x, kernel, "t:taps")), expected)
        with pytest.raises(errors.DivisibilityError):
            c.conv(x, kernel, "t:taps", padding="VALID")


def test_an_axis_of_one_device_splits_nothing() -> None:
    x, kernel = pair()
    expected = np.asarray(c.conv(x, kernel, "t:taps", padding="VALID"))
    with mn.rules("t:rows;batch:cols", mw.create_mesh({"rows": 1, "cols": 4, "rest": 2})):
        result = c.conv(x, kernel, "t:taps", padding="VALID")
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5)
