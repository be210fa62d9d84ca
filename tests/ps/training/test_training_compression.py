"""Compressed gradients: what servers read, and that nothing is lost for good."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import meshwright as mw
from meshwright.ps.server.codecs import decode_gradient
from meshwright.ps.training.compression import Half, TopK, compression, pack_gradient

HOWS = [TopK(0.1), TopK(1.0), Half("float16"), Half("bfloat16")]
gradients = hnp.arrays(
    np.float32,
    hnp.array_shapes(max_dims=2, max_side=9),
    elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
)


def decoded(packed, shape):
    return decode_gradient(packed.options["codec"], packed.arrays, shape)


@pytest.mark.parametrize("how", HOWS, ids=repr)
@given(gradient=gradients)
def test_what_arrives_and_what_is_left_are_the_gradient(how, gradient):
    packed = pack_gradient(how, gradient)
    np.testing.assert_allclose(
        decoded(packed, gradient.shape) + packed.residual, gradient, rtol=1e-6
    )


@pytest.mark.parametrize("how", HOWS, ids=repr)
def test_with_feedback_the_sum_of_many_arrives(how):
    rng = np.random.default_rng(0)
    left, sent, arrived = None, np.zeros(50), np.zeros(50)
    for _ in range(200):
        gradient = rng.normal(size=50).astype("float32")
        packed = pack_gradient(how, gradient, left)
        left = packed.residual
        sent += gradient
        arrived += decoded(packed, gradient.shape)
    assert np.abs(sent - arrived).max() < 12  # what is left of at most some ten steps
    np.testing.assert_allclose(arrived + left, sent, atol=1e-3)


def test_the_largest_values_are_the_ones_that_go():
    gradient = np.arange(-50, 50, dtype="float32")
    places, values = pack_gradient(TopK(0.02), gradient).arrays
    assert places.tolist() == [0, 1] or places.tolist() == [0, 99]
    assert abs(values).min() >= 49


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_half_the_bytes(dtype):
    gradient = np.ones([8, 8], "float32")
    assert sum(array.nbytes for array in pack_gradient(Half(dtype), gradient).arrays) == 128


def test_numbers_too_large_for_float16_come_later():
    packed = pack_gradient(Half("float16"), np.array([1e6], "float32"))
    assert np.isfinite(packed.arrays[0]).all()
    assert packed.residual is not None
    assert packed.residual[0] > 9e5


@pytest.mark.parametrize("how", HOWS, ids=repr)
def test_what_is_not_finite_arrives_and_is_not_kept(how):
    gradient = np.ones([40], "float32")
    gradient[:6] = [np.inf, -np.inf, np.nan, np.inf, np.nan, -np.inf]
    packed = pack_gradient(how, gradient)
    assert np.isfinite(packed.residual).all()
    assert (~np.isfinite(decoded(packed, gradient.shape))).sum() >= 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Half("int8"), "must be one of .'float16', 'bfloat16'"),
        (lambda: compression("gzip"), "unknown compression='gzip'"),
    ],
)
def test_what_is_no_compression_is_refused(make, says):
    with pytest.raises(mw.ClusterError, match=says):
        make()
    with pytest.raises(mw.ModelError, match="must be > 0"):  # on a mesh as well
        TopK(0.0)
