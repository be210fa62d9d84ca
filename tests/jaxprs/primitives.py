"""Small functions that, together, trace to every primitive of which dims are followed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.layout
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

GATHER, SCATTER = lax.GatherDimensionNumbers, lax.ScatterDimensionNumbers


class Case(NamedTuple):
    """A function of arrays and the shapes of them; integer arrays are of small numbers."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: str = "f"  # of each argument the last letter's, or its own: f(loat), i(nteger), b(ool)

    def arguments(self) -> list[Any]:
        """Arrays to call it with, of small integers or of numbers between 0.1 and 0.9."""
        draw = np.random.default_rng(0)
        makes = {
            "f": lambda shape: draw.uniform(0.1, 0.9, shape).astype("float32"),
            "i": lambda shape: draw.integers(0, 3, shape).astype("int32"),
            "b": lambda shape: draw.uniform(size=shape) < 0.5,
        }
        return [
            jnp.asarray(makes[letter](shape))
            for letter, shape in zip(self.letters, self.shapes, strict=True)
        ]

    def traced(self, shapes: Sequence[tuple[int, ...]] = ()) -> Any:
        """The closed jaxpr, for these shapes or its own."""
        kinds = {"f": "float32", "i": "int32", "b": "bool"}
        pairs = zip(shapes or self.shapes, self.letters, strict=True)
        avals = [jax.ShapeDtypeStruct(shape, kinds[letter]) for shape, letter in pairs]
        return jax.make_jaxpr(self.function)(*avals)

    @property
    def letters(self) -> str:
        return self.dtypes + self.dtypes[-1] * (len(self.shapes) - len(self.dtypes))


def one(function: Callable[..., Any], *shapes: tuple[int, ...], dtypes: str = "f") -> Case:
    return Case(function, shapes, dtypes)


UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf"
    " erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign"
    " sin sinh sqrt square tan tanh"
)
OF_SOME_RELEASES = "log2 one_minus_square"  # JAX 0.11 on
BINARY = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub igamma igammac zeta"
INTEGERS = "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic"


def _elementwise() -> dict[str, Case]:
    unary = [*UNARY.split(), *filter(functools.partial(hasattr, lax), OF_SOME_RELEASES.split())]
    cases = {name: one(getattr(lax, name), (4, 6)) for name in unary}
    cases |= {name: one(getattr(lax, name), (4, 6), (4, 6)) for name in BINARY.split()}
    cases |= {
        name: one(getattr(lax, name), (4, 6), (4, 6), dtypes="i") for name in INTEGERS.split()
    }
    if hasattr(lax, "polynomial"):  # JAX 0.12 on
        cases["polynomial"] = one(lambda x, y: lax.polynomial(x, [2.0, y, 3.0]), (4, 6), (4, 6))
    return cases | {
        "shift_right_logical": one(lax.shift_right_logical, (4,), (4,), dtypes="i"),
        "not": one(lax.bitwise_not, (4, 6), dtypes="i"),
        "population_count": one(lax.population_count, (4, 6), dtypes="i"),
        "clz": one(lax.clz, (4, 6), dtypes="i"),
        "clamp": one(lambda x, low: lax.clamp(low, x, low + 0.3), (4, 6), (4, 6)),
        "clamp by numbers": one(lambda x: lax.clamp(0.2, x, 0.7), (4, 6)),
        "complex": one(lambda x, y: lax.conj(lax.complex(x, y)) * 2, (4, 6), (4, 6)),
        "real and imag": one(
            lambda x, y: (lax.real(lax.complex(x, y)), lax.imag(lax.complex(x, y))), (4,), (4,)
        ),
        "integer_pow": one(lambda x: x**3, (4, 6)),
        "convert_element_type": one(lambda x: x.astype("bfloat16"), (4, 6)),
        "reduce_precision": one(lambda x: lax.reduce_precision(x, 5, 7), (4, 6)),
        "stop_gradient": one(lax.stop_gradient, (4, 6)),
        "copy": one(jnp.copy, (4, 6)),
        "select_n": one(jnp.where, (4, 6), (4, 6), (4, 6), dtypes="bf"),
        "select_n by a number": one(
            lambda which, x, y: lax.select_n(which, x, y), (), (4, 6), (4, 6), dtypes="bf"
        ),
        "one element along a dim": one(lambda x, y: lax.add(x, y), (4, 6), (4, 1)),
        "name": one(lambda x: checkpoint_name(x, "x"), (4, 6)),
        "optimization_barrier": one(lambda x, y: lax.optimization_barrier((x, y)), (4, 6), (6, 2)),
        "regularized_incomplete_beta": one(lax.betainc, (4,), (4,), (4,)),
        "polygamma": one(lambda x: lax.polygamma(1.0 + 0 * x, x + 1), (4,)),
        "igamma_grad_a": one(lax.igamma_grad_a, (4, 6), (4, 6)),
        "bitcast to the same width": one(lambda x: lax.bitcast_convert_type(x, "int32"), (4, 6)),
        "bitcast to bytes": one(lambda x: lax.bitcast_convert_type(x, "uint8"), (4, 6)),
        "bitcast from bytes": one(
            lambda x: lax.bitcast_convert_type(x.astype("uint8"), "float32"), (4, 4), dtypes="i"
        ),
        "threefry2x32": one(_threefry, (4,), (4,), dtypes="i"),
        "mulhi": one(lambda x, y: lax.mulhi(x << 20, y << 20), (4, 6), (4, 6), dtypes="i"),
        **{
            name: one(getattr(lax, f"{name}_p").bind, (4, 6), (4, 6))
            for name in ("eq_to", "le_to", "lt_to")  # by which a sort compares
        },
    }


def _threefry(x: Any, y: Any) -> Any:
    from jax.extend.random import threefry2x32_p

    x, y = x.astype("uint32"), y.astype("uint32")
    return threefry2x32_p.bind(x, y, x + 1, y + 1)


def _shapes() -> dict[str, Case]:
    return {
        "transpose": one(lambda x: lax.transpose(x, (2, 0, 1)), (4, 6, 3)),
        "squeeze": one(lambda x: lax.squeeze(x, (1,)), (4, 1, 3)),
        "broadcast_in_dim": one(
            lambda x: lax.broadcast_in_dim(x, (x.shape[0], 3, x.shape[1]), (0, 2)), (4, 6)
        ),
        "broadcast_in_dim from one": one(
            lambda x: lax.broadcast_in_dim(x, (x.shape[0], 5), (0, 1)), (4, 1)
        ),
        "reshape, merged": one(lambda x: x.reshape(-1, x.shape[2]), (4, 6, 3)),
        "reshape, merged behind": one(lambda x: x.reshape(x.shape[0], -1), (4, 6, 3)),
        "reshape, split": one(lambda x: x.reshape(-1, 2, x.shape[1]), (8, 3)),
        "reshape, regrouped": one(lambda x: x.reshape(4, 6), (6, 4)),
        "reshape, flat": one(lambda x: x.reshape(-1), (4, 2, 3)),
        "reshape, with ones": one(lambda x: x.reshape(x.shape[0], 1, -1, 1), (4, 2, 3)),
        "pad behind": one(lambda x: jnp.pad(x, ((0, 0), (1, 2))), (4, 6)),
        "pad with gaps": one(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 2))), (4, 6)),
        "pad by one and take one": one(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))), (4, 6)),
        "rev": one(lambda x: lax.rev(x, (1,)), (4, 6)),
        "slice": one(lambda x: x[:, 1:5:2], (4, 6)),
        "slice all rows": one(lambda x: lax.slice(x, (0, 2), (x.shape[0], 6)), (4, 6)),
        "split": one(lambda x: lax.split(x, [2, 4], axis=1), (4, 6)),
        "concatenate": one(lambda x, y: lax.concatenate([x, y], 1), (4, 6), (4, 2)),
        "concatenate three": one(lambda x, y: lax.concatenate([x, y, x], 1), (4, 2), (4, 2)),
        "stack": one(lambda x, y: jnp.stack([x, y], 1), (4, 6), (4, 6)),
        "unstack": one(lambda x: jnp.unstack(x, axis=1), (4, 3)),
        "tile": one(lambda x: jnp.tile(x, (1, 3)), (4, 2)),
        "tile of one": one(lambda x: jnp.tile(x, (1, 3, 1)), (4, 1, 2)),
        "iota": one(lambda x: x + lax.broadcasted_iota("float32", x.shape, 1), (4, 6)),
        "iota of rows": one(lambda x: x + lax.broadcasted_iota("float32", x.shape, 0), (4, 6)),
        "expand_dims": one(lambda x: x[:, None], (4, 6)),
    }


def _reductions() -> dict[str, Case]:
    names = "reduce_sum reduce_max reduce_min reduce_prod"
    cases = {
        name: one(functools.partial(getattr(lax, name), axes=(1,)), (4, 6, 3))
        for name in names.split()
    }
    return cases | {
        "reduce_and": one(lambda x: jnp.all(x, 1), (4, 6), dtypes="b"),
        "reduce_or": one(lambda x: jnp.any(x, 1), (4, 6), dtypes="b"),
        "reduce_xor": one(lambda x: lax.reduce_xor(x, [1]), (4, 6), dtypes="i"),
        "argmax": one(lambda x: jnp.argmax(x, 1), (4, 6)),
        "argmin": one(lambda x: jnp.argmin(x, 0), (4, 6)),
        "reduce": one(
            lambda x, y: lax.reduce(
                (x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)
            ),
            (4, 6),
            (4, 6),
        ),
        "cumsum": one(lambda x: lax.cumsum(x, 1), (4, 6)),
        "cumprod": one(lambda x: lax.cumprod(x, 1, reverse=True), (4, 6)),
        "cummax": one(lambda x: lax.cummax(x, 1), (4, 6)),
        "cummin": one(lambda x: lax.cummin(x, 0), (4, 6)),
        "cumlogsumexp": one(lambda x: lax.cumlogsumexp(x, 1), (4, 6)),
        "sort": one(lambda x: lax.sort(x, dimension=1), (4, 6)),
        "sort by a key": one(lambda x, y: lax.sort((x, y), dimension=1), (4, 6), (4, 6)),
        "top_k": one(lambda x: lax.top_k(x, 2), (4, 6)),
        "approx_top_k": one(lambda x: lax.approx_max_k(x, 2), (4, 6)),
        "fft": one(lambda x: jnp.fft.fft(x), (4, 6)),
        "rfft": one(lambda x: jnp.fft.rfft2(x), (4, 6, 8)),
    }


def _products() -> dict[str, Case]:
    def convolve(form: str = "NHWC", **how: Any) -> Callable[..., Any]:
        spec = (form, "HWIO", form)
        return lambda x, k: lax.conv_general_dilated(x, k, dimension_numbers=spec, **how)

    def pool(function: Any, **how: Any) -> Callable[..., Any]:
        first = 0.0 if function is lax.add else -jnp.inf if function is lax.max else jnp.inf
        return lambda x: lax.reduce_window(x, first, function, **how)

    image, kernel = (4, 6, 5, 2), (3, 2, 2, 4)
    plain = {"window_strides": (1, 1), "padding": "SAME"}
    windows = {"window_dimensions": (1, 3), "window_strides": (1, 2), "padding": "SAME"}
    tight = {"window_dimensions": (1, 3), "window_strides": (1, 1), "padding": "SAME"}
    return {
        "matmul": one(jnp.matmul, (4, 6), (6, 3)),
        "matmul of batches": one(jnp.matmul, (2, 4, 6), (2, 6, 3)),
        "attention": one(
            lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (4, 5, 2, 3), (4, 6, 2, 3)
        ),
        "outer": one(lambda x, y: jnp.tensordot(x, y, 0), (4,), (3,)),
        "inner": one(jnp.dot, (4,), (4,)),
        "ragged_dot": one(_ragged, (6, 4), (3, 4, 5)),
        "convolution": one(convolve(**plain), image, kernel),
        "convolution, strided": one(
            convolve(window_strides=(2, 1), padding="VALID"), image, kernel
        ),
        "convolution, dilated": one(
            convolve(
                window_strides=(1, 1),
                padding=((1, 1), (0, 2)),
                lhs_dilation=(2, 1),
                rhs_dilation=(1, 2),
            ),
            image,
            kernel,
        ),
        "convolution of channels first": one(convolve("NCHW", **plain), (4, 2, 6, 5), kernel),
        "convolution by ones": one(convolve(**plain), image, (1, 1, 2, 4)),
        "convolution over all": one(
            convolve(window_strides=(1, 1), padding="VALID"), image, (6, 5, 2, 4)
        ),
        "convolution by a large window": one(
            convolve(window_strides=(1, 1), padding=((1, 1), (1, 1))), image, (6, 5, 2, 4)
        ),
        "convolution in groups": one(
            convolve(**plain, feature_group_count=2), (4, 6, 5, 4), (3, 2, 2, 6)
        ),
        "convolution by depth": one(
            convolve(**plain, feature_group_count=4), (4, 6, 5, 4), (3, 2, 1, 8)
        ),
        "convolution in groups of rows": one(convolve(**plain, batch_group_count=2), image, kernel),
        "reduce_window_sum": one(pool(lax.add, **windows), (4, 6)),
        "reduce_window_max": one(pool(lax.max, **windows), (4, 6)),
        "reduce_window_min": one(pool(lax.min, **tight), (4, 6)),
        "reduce_window": one(
            lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + b * 2, (1, 3), (1, 2), "SAME"),
            (4, 6),
        ),
        "gradient of sum pooling": one(jax.grad(_total(pool(lax.add, **windows))), (4, 6)),
        "gradient of max pooling": one(jax.grad(_total(pool(lax.max, **windows))), (4, 6)),
        "tangent of max pooling": one(
            lambda x, t: jax.jvp(pool(lax.max, **tight), (x,), (t,))[1], (4, 6), (4, 6)
        ),
        "gradient of a convolution": one(
            jax.grad(_total(convolve(**plain)), (0, 1)), image, kernel
        ),
        "gradient of a convolution in groups": one(
            jax.grad(_total(convolve(**plain, feature_group_count=2)), (0, 1)),
            (4, 6, 5, 4),
            (3, 2, 2, 6),
        ),
        "gradient of a convolution by ones": one(
            jax.grad(_total(convolve(**plain)), (0, 1)), image, (1, 1, 2, 4)
        ),
    }


def _ragged(x: Any, y: Any) -> Any:
    return lax.ragged_dot(x, y, jnp.array([1, 2, x.shape[0] - 3], "int32"))


def _total(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jnp.sum(jnp.sin(function(*args)))


def _places() -> dict[str, Case]:
    def put(name: str, **how: Any) -> Callable[..., Any]:
        return lambda x, at, new: getattr(x.at[at], name)(new, **how)

    cases = {
        f"scatter {name}": one(put(name), (5, 6), (4,), (4, 6), dtypes="fif")
        for name in ("set", "add", "multiply", "min", "max")
    }
    rows = {"offset_dims": (1,), "collapsed_slice_dims": (0,), "start_index_map": (0,)}
    return cases | {
        "gather rows": one(lambda x, at: x[at], (5, 6), (4,), dtypes="fi"),
        "gather by hand": one(
            lambda x, at: lax.gather(x, at[:, None], GATHER(**rows), (1, 3)),
            (5, 6),
            (4,),
            dtypes="fi",
        ),
        "gather columns": one(lambda x, at: x[:, at], (4, 6), (3,), dtypes="fi"),
        "gather along": one(
            lambda x, at: jnp.take_along_axis(x, at, 1), (4, 6), (4, 3), dtypes="fi"
        ),
        "gather windows": one(
            lambda x, at: jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (2, x.shape[1])))(at),
            (5, 6),
            (4,),
            dtypes="fi",
        ),
        "gather windows of rows": one(
            lambda x, at: jax.vmap(lambda row, i: lax.dynamic_slice(row, (i,), (2,)))(x, at),
            (4, 6),
            (4,),
            dtypes="fi",
        ),
        "gradient of a lookup": one(
            jax.grad(lambda x, at: jnp.sum(jnp.sin(x[at]))), (5, 6), (4,), dtypes="fi"
        ),
        "scatter in rows": one(
            lambda x, at, new: jax.vmap(lambda row, i, n: row.at[i].add(n))(x, at, new),
            (4, 6),
            (4, 3),
            (4, 3),
            dtypes="fif",
        ),
        "scatter windows": one(
            lambda x, at, new: lax.scatter_add(x, at[:, None], new, SCATTER((1,), (0,), (0,))),
            (5, 6),
            (4,),
            (4, 3),
            dtypes="fif",
        ),
        "scatter subtract": one(
            lambda x, at, new: lax.scatter_sub(x, at[:, None], new, SCATTER((1,), (0,), (0,))),
            (5, 6),
            (4,),
            (4, 6),
            dtypes="fif",
        ),
        "dynamic_slice": one(
            lambda x, i: lax.dynamic_slice(x, (0, i), (x.shape[0], 2)), (4, 6), (), dtypes="fi"
        ),
        "dynamic_update_slice": one(
            lambda x, new, i: lax.dynamic_update_slice(x, new, (0, i)),
            (4, 6),
            (4, 2),
            (),
            dtypes="ffi",
        ),
        "dynamic_update_slice of all": one(
            lambda x, new, i: lax.dynamic_update_slice(x, new, (i, 0)),
            (4, 6),
            (4, 6),
            (),
            dtypes="ffi",
        ),
    }


def _linear_algebra() -> dict[str, Case]:
    def square(x: Any) -> Any:
        return x + 9 * jnp.eye(x.shape[-1])

    return {
        "eig": one(jnp.linalg.eig, (4, 3, 3)),
        "schur": one(lambda x: lax.linalg.schur(square(x)), (4, 3, 3)),
        "householder_product": one(lax.linalg.householder_product, (4, 5, 3), (4, 3)),
        "lu_pivots_to_permutation": one(
            lambda x: lax.linalg.lu_pivots_to_permutation(x, 5), (4, 3), dtypes="i"
        ),
        "cholesky": one(lambda x: jnp.linalg.cholesky(square(x)), (4, 3, 3)),
        "triangular_solve": one(
            lambda a, b: lax.linalg.triangular_solve(square(a), b), (4, 3, 3), (4, 2, 3)
        ),
        "lu": one(lambda x: lax.linalg.lu(square(x)), (4, 3, 3)),
        "qr": one(jnp.linalg.qr, (4, 5, 3)),
        "eigh": one(jnp.linalg.eigh, (4, 3, 3)),
        "svd": one(lambda x: jnp.linalg.svd(x, full_matrices=False), (4, 5, 3)),
        "tridiagonal_solve": one(lax.linalg.tridiagonal_solve, (4, 3), (4, 3), (4, 3), (4, 3, 2)),
        "solve": one(lambda a, b: jnp.linalg.solve(square(a), b), (4, 3, 3), (4, 3, 2)),
    }


def _random() -> dict[str, Case]:
    def keys(x: Any) -> Any:
        return jax.random.split(jax.random.key(0), x.shape[0])

    return {
        "rng_bit_generator": one(
            lambda key: lax.rng_bit_generator(key.astype("uint32"), (4, 6)), (4,), dtypes="i"
        ),
        "rng_uniform": one(lambda low: lax.rng_uniform(low, low + 1, (4, 6)), ()),
        "empty": one(lambda x: x * 0 + lax.empty(x.shape, x.dtype), (4, 6)),
        "random_bits": one(lambda x: x + jax.random.normal(jax.random.key(0), x.shape), (4, 6)),
        "random_bits of columns": one(
            lambda x: x + jax.random.uniform(jax.random.key(1), x.shape[::-1]).T, (4, 6)
        ),
        "random_bits of keys": one(lambda x: jax.vmap(jax.random.bits)(keys(x)), (4,)),
        "random_fold_in": one(
            lambda x: jax.random.key_data(jax.vmap(jax.random.fold_in)(keys(x), x)),
            (4,),
            dtypes="i",
        ),
        "random_wrap": one(
            lambda x: jax.random.bits(jax.random.wrap_key_data(x.astype("uint32"))),
            (2,),
            dtypes="i",
        ),
        "random_clone": one(lambda x: jax.random.key_data(jax.random.clone(keys(x))), (4,)),
    }


def _control() -> dict[str, Case]:
    return {
        "scan": one(lambda x: lax.scan(lambda c, row: (c + row, c * row), x[:, 0], x.T), (4, 6)),
        "scan over rows": one(lambda x: lax.scan(lambda c, r: (c, r * 2), 0.0, x), (4, 6)),
        "while": one(lambda x: lax.fori_loop(0, 3, lambda i, c: c * c - x, x), (4, 6)),
        "while by values": one(
            lambda x: lax.while_loop(lambda c: c[0, 0] < 5, lambda c: c + 1, x), (4, 6)
        ),
        "cond": one(lambda x: lax.cond(x.shape[1] > jnp.sum(x[0, 0]), jnp.sin, jnp.cos, x), (4, 6)),
        "checkpoint": one(jax.grad(_total(jax.checkpoint(jnp.tanh))), (4, 6)),
        "jit": one(jax.jit(lambda x: jax.nn.relu(x) - jax.nn.silu(x)), (4, 6)),
        "softmax": one(lambda x: jax.nn.softmax(x), (4, 6)),
        "norm of rows": one(lambda x: (x - x.mean(1, keepdims=True)) / x.std(), (4, 6)),
        "median": one(lambda x: jnp.median(x, 1), (4, 6)),
        "argsort": one(lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1), (4, 6)),
        "linear solve": one(lambda x: jax.scipy.sparse.linalg.cg(lambda v: v * 2.0, x)[0], (4, 6)),
        "pure_callback": one(
            lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
            (4, 6),
        ),
    }


def one_device(kind: jax.sharding.AxisType = jax.sharding.AxisType.Auto) -> jax.sharding.Mesh:
    """A mesh of one device, on which shards are whole arrays."""
    return jax.make_mesh((1,), ("i",), axis_types=(kind,), devices=jax.devices()[:1])


def _meshes() -> dict[str, Case]:
    def mapped(function: Callable[..., Any], *specs: Any, **how: Any) -> Callable[..., Any]:
        *ins, out = specs
        return lambda *args: jax.shard_map(
            function, mesh=one_device(), in_specs=tuple(ins), out_specs=out, **how
        )(*args)

    split, whole = jax.P("i"), jax.P()
    layout = jax.experimental.layout
    explicit = one_device(jax.sharding.AxisType.Explicit)
    return {
        "psum": one(mapped(lambda x: lax.psum(x, "i"), split, whole, check_vma=False), (4, 6)),
        "psum_invariant": one(mapped(lambda x: lax.psum(x, "i"), split, whole), (4, 6)),
        "pvary": one(mapped(lambda x, y: x * y, split, whole, split), (4, 6), (4, 6)),
        "shard_map": one(mapped(lambda x: lax.cumsum(x, 1), split, split), (4, 6)),
        "sharding_constraint": one(
            lambda x: lax.with_sharding_constraint(x, jax.NamedSharding(one_device(), split)),
            (4, 6),
        ),
        "layout_constraint": one(
            lambda x: layout.with_layout_constraint(x, layout.Layout((1, 0))), (4, 6)
        ),
        "reshard": one(
            lambda x: jax.sharding.reshard(x, jax.NamedSharding(explicit, split)), (4, 6)
        ),
    }


CASES: dict[str, Case] = {
    **_elementwise(),
    **_shapes(),
    **_reductions(),
    **_products(),
    **_places(),
    **_linear_algebra(),
    **_random(),
    **_control(),
    **_meshes(),
}
