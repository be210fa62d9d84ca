"""What one HLO instruction computes, reads and writes, with all that is fused into it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..jaxprs.products import CONVOLUTIONS, is_skinny, is_transposed
from .text import Array, Computation, Instruction, Module

FREE = {  # views of what is there, or known beforehand
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
    *("partition-id", "replica-id", "opt-barrier", "optimization-barrier", "add-dependency"),
}
_MOVES = {  # no arithmetic
    *("broadcast", "iota", "copy", "transpose", "reshape", "slice", "concatenate", "pad", "gather"),
    *("dynamic-slice", "dynamic-update-slice", "scatter", "reverse", "fusion", "custom-call"),
}
_TRANSCENDENTALS = {
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "erf"),
    *("sine", "cosine", "tan", "atan2", "power", "cbrt"),
}
_READS_A_PART = ("dynamic-slice", "slice", "gather")
_NO_PRODUCTS = re.compile(
    r"Shard|SPMD|Gather|Scatter|AllocateBuffer|TopK|Pin|Rng|Layout|Annotate|Move|Concat|Bitcast"
)


_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul")  # XLA for GPU; convolutions of cuDNN likewise
_CONVOLUTIONS = ("__cudnn$convForward", "__cudnn$convBias", "__cudnn$convBackward")


@dataclass(frozen=True)
class Work:
    """Arithmetic: FLOPs of products, elements of everything else, those of exponentials and the
    like among them; the heaviest of the products."""

    flops: float = 0.0
    elements: int = 0
    transcendentals: int = 0
    heaviest: Instruction | None = None
    heaviest_flops: float = 0.0
    dtype: str = ""
    kind: str = "product"
    uncounted: tuple[str, ...] = ()  # kernels written by hand, whose work is unknown

    def __add__(self, other: Work) -> Work:
        heavier = max(self, other, key=lambda work: work.heaviest_flops)
        return Work(
            self.flops + other.flops,
            self.elements + other.elements,
            self.transcendentals + other.transcendentals,
            heavier.heaviest,
            heavier.heaviest_flops,
            heavier.dtype,
            heavier.kind,
            self.uncounted + other.uncounted,
        )


def work_of(instruction: Instruction, inside: Computation, module: Module) -> Work:
    """The arithmetic of an instruction and of the computation that is fused into it."""
    if instruction.opcode == "dot":
        return _product(instruction, inside, _dot(instruction, inside))
    if instruction.opcode == "convolution":
        image, kernel = (_results(name, inside)[0] for name in instruction.operands[:2])
        return _product(
            instruction, inside, _convolution(instruction, image, kernel, instruction.results[0])
        )
    if instruction.opcode == "custom-call":
        return _custom_call(instruction, inside)
    elements = _elements(instruction, inside)
    is_transcendental = instruction.opcode in _TRANSCENDENTALS
    total = Work(elements=elements, transcendentals=elements if is_transcendental else 0)
    for name in instruction.called:
        fused = module.computations[name]
        total = sum((work_of(part, fused, module) for part in fused.instructions), total)
    return total


def _product(instruction: Instruction, inside: Computation, flops: float) -> Work:
    dtypes = [array.dtype for name in instruction.operands[:1] for array in _results(name, inside)]
    kind = _kind(instruction, inside)
    return Work(flops, 0, 0, instruction, flops, dtypes[0] if dtypes else "", kind)


def _kind(instruction: Instruction, inside: Computation) -> str:
    """``"product"``, ``"product_skinny"``, ``"product_transposed"``, ``"convolution"`` or
    ``"grouped_convolution"``, whose speeds differ."""
    if instruction.opcode == "dot":
        return _kind_of_dot(instruction, inside)
    if instruction.opcode != "convolution":
        return "product"
    groups = instruction.attribute(r"feature_group_count=(\d+)") or "1"
    return CONVOLUTIONS[groups != "1"]


def _kind_of_dot(instruction: Instruction, inside: Computation) -> str:
    """By what a layer does: its gradient of weights sums over the rows of both operands, and few
    rows by many weights read much for what they compute."""
    left, right = (_results(name, inside)[0].dims for name in instruction.operands[:2])
    summed = _numbers(instruction, r"lhs_contracting_dims=\{([^}]*)")
    with_ = _numbers(instruction, r"rhs_contracting_dims=\{([^}]*)")
    if _numbers(instruction, r"lhs_batch_dims=\{([^}]*)") or not summed or not with_:
        return "product"
    if is_transposed(summed, with_, (len(left), len(right))):
        return "product_transposed"
    depth = math.prod(left[dim] for dim in summed)
    rows, columns = (math.prod(dims) // max(depth, 1) for dims in (left, right))
    return "product_skinny" if is_skinny(rows, columns, depth) else "product"


def _dot(instruction: Instruction, inside: Computation) -> float:
    (left,) = _results(instruction.operands[0], inside)
    depth = math.prod(
        left.dims[dim] for dim in _numbers(instruction, r"lhs_contracting_dims=\{([^}]*)")
    )
    return 2.0 * depth * instruction.results[0].elements


def _convolution(instruction: Instruction, of: Array, by: Array, result: Array) -> float:
    """As ``HloCostAnalysis`` counts: one product per place of a window that lies on an element.

    TPUs spell every product as a convolution, the dims of a batch as windows of which one place
    at a time lies on the image: to count whole windows would be wrong many times over.
    """
    image, kernel, out = of.dims, by.dims, result.dims
    labels = instruction.attribute(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)") or ""
    of_image, of_kernel, of_out = re.split(r"_|->", labels)
    total = 2.0 * kernel[of_kernel.index("i")]
    total *= out[of_out.index("f")] * out[of_out.index("b")]
    for dim in sorted(set(re.findall(r"\d", of_image))):
        total *= _places(
            image[of_image.index(dim)],
            kernel[of_kernel.index(dim)],
            out[of_out.index(dim)],
            *_window(instruction, int(dim)),
        )
    return total


def _window(instruction: Instruction, dim: int) -> tuple[int, int, int, int]:
    """``(stride, padding before, dilation of the image, dilation of the window)`` of one dim."""
    text = instruction.attribute(r"window=\{([^}]*)\}") or ""

    def of(name: str, default: int) -> int:
        result = re.search(rf"\b{name}=([\w\-]+)", text)
        return int(result[1].split("x")[dim].partition("_")[0]) if result else default

    return of("stride", 1), of("pad", 0), of("lhs_dilate", 1), of("rhs_dilate", 1)


@functools.lru_cache(maxsize=4096)
def _places(
    size: int, window: int, out: int, stride: int, padding: int, spread: int, gaps: int
) -> int:
    """How many pairs of (output, place in the window) lie on an element of the image."""
    shared = math.gcd(stride, spread)
    period = spread // shared
    total = 0
    for place in range(window):
        begin = place * gaps - padding  # output o lies at o * stride + begin
        low = max(0, -(begin // stride))
        high = min(out - 1, ((size - 1) * spread - begin) // stride)
        if begin % shared == 0 and high >= low:
            first = -(begin // shared) * pow(stride // shared, -1, period) % period
            total += (high - first) // period - (low - 1 - first) // period
    return total


def _custom_call(instruction: Instruction, inside: Computation) -> Work:
    """Kernels of libraries, and those written by hand: Pallas notes their FLOPs; of others nothing
    is known."""
    match = instruction.attribute(r'"flops"\s*:\s*"?(\d+)')
    if match is not None:
        return _product(instruction, inside, float(match))
    target = _kernel(instruction)
    if target.startswith(_GEMMS):
        return _product(instruction, inside, _gemm(instruction, inside))
    if target.startswith(_CONVOLUTIONS):
        return _product(instruction, inside, _library_convolution(instruction, inside))
    return Work() if _NO_PRODUCTS.search(target) else Work(uncounted=(target,))


def _gemm(instruction: Instruction, inside: Computation) -> float:
    """A product that cuBLAS computes; its other results are room to work in."""
    (left,) = _results(instruction.operands[0], inside)
    dims = _numbers(instruction, r'"lhs_contracting_dimensions":\[([^\]]*)')
    return 2.0 * math.prod(left.dims[dim] for dim in dims) * instruction.results[0].elements


def _library_convolution(instruction: Instruction, inside: Computation) -> float:
    """A convolution that cuDNN computes: labels and window of its gradients are those forwards."""
    first, second = (_results(name, inside)[0] for name in instruction.operands[:2])
    result = instruction.results[0]
    if "BackwardInput" in _kernel(instruction):  # of the result's gradient and the kernel
        return _convolution(instruction, result, second, first)
    if "BackwardFilter" in _kernel(instruction):  # of the image and the result's gradient
        return _convolution(instruction, first, result, second)
    return _convolution(instruction, first, second, result)


def _kernel(instruction: Instruction) -> str:
    """The name of what a custom call runs; empty for every other instruction."""
    return instruction.attribute(r'custom_call_target="([^"]*)"') or ""


def _elements(instruction: Instruction, inside: Computation) -> int:
    if instruction.opcode in FREE | _MOVES or instruction.opcode.endswith("-start"):
        return 0
    if instruction.opcode.startswith("reduce"):
        return sum(array.elements for array in _results(instruction.operands[0], inside))
    return max((array.elements for array in instruction.results), default=0)


# Bytes


def bytes_moved(instruction: Instruction, inside: Computation, module: Module) -> tuple[int, int]:
    """Bytes read and written in the device's main memory.

    Of what is cut out of an operand only the cut is read; of what is changed in place only the
    change is written. What lies in other memory, such as the on-chip memory of a TPU, is free.
    """
    if instruction.opcode == "custom-call" and _kernel(instruction) == "AllocateBuffer":
        return 0, 0  # room that others write
    if instruction.opcode == "copy-start":  # its results: the copy, the original, a signal
        copy, original = instruction.results[:2]
        return _in_main_memory(original), _in_main_memory(copy)
    if instruction.opcode == "slice-start":  # the original, the cut, a signal
        original, cut = instruction.results[:2]
        return min(_in_main_memory(original), cut.nbytes), _in_main_memory(cut)
    is_fused = instruction.opcode in ("fusion", "fusion-start")
    fused = module.computations[instruction.called[0]] if is_fused else None
    cuts = _parts_read(instruction) if fused is None else _parts_read_by(fused, module)
    read = 0
    for place, name in enumerate(instruction.operands):
        whole = sum(map(_in_main_memory, _results(name, inside)))
        read += min(whole, cuts.get(place, whole))
    root, within = (instruction, inside) if fused is None else (fused.root, fused)
    written = _written(root, within, module)
    return read, min(written, sum(map(_in_main_memory, instruction.results)))


def _in_main_memory(array: Array) -> int:
    return 0 if array.space else array.nbytes


def _parts_read(instruction: Instruction) -> Mapping[int, int]:
    if instruction.opcode in _READS_A_PART:
        return {0: sum(array.nbytes for array in instruction.results)}
    return {0: 0} if instruction.opcode in ("dynamic-update-slice", "scatter") else {}


def _parts_read_by(fused: Computation, module: Module) -> Mapping[int, int]:
    """Place of a parameter -> bytes read of it, where only parts of it are.

    TPUs have fusions within fusions.
    """
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for instruction in fused.instructions:
        for place, name in enumerate(instruction.operands):
            users.setdefault(name, []).append((instruction, place))

    def read(name: str, size: int) -> int:
        total = 0
        for user, place in users.get(name, []):
            if user.opcode == "bitcast":
                total += read(user.name, size)
            elif user.opcode == "fusion":
                inner = _parts_read_by(module.computations[user.called[0]], module)
                total += inner.get(place, size)
            else:
                total += _parts_read(user).get(place, size)
        return min(total, size)

    return {
        int(instruction.operands[0]): read(
            instruction.name, sum(array.nbytes for array in instruction.results)
        )
        for instruction in fused.instructions
        if instruction.opcode == "parameter"
    }


def _written(instruction: Instruction, inside: Computation, module: Module) -> int:
    if instruction.opcode == "tuple":
        return sum(_written(inside.by_name[name], inside, module) for name in instruction.operands)
    if instruction.opcode == "bitcast" and instruction.operands[0] in inside.by_name:
        target = inside.by_name[instruction.operands[0]]
        is_argument = target.opcode == "parameter"
        return instruction.results[0].nbytes if is_argument else _written(target, inside, module)
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        return _written(inner.root, inner, module)
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        place = 1 if instruction.opcode == "dynamic-update-slice" else 2
        return sum(array.nbytes for array in _results(instruction.operands[place], inside))
    # A library writes its first result; the rest is room to work in.
    is_library = _kernel(instruction).startswith((*_GEMMS, *_CONVOLUTIONS))
    return sum(array.nbytes for array in instruction.results[: 1 if is_library else None])


def _results(name: str, inside: Computation) -> tuple[Array, ...]:
    return inside.by_name[name].results if name in inside.by_name else ()


def _numbers(instruction: Instruction, pattern: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", instruction.attribute(pattern) or "")]
