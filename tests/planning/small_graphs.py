"""Training steps as graphs, written by hand: what the search is tried on."""

from __future__ import annotations

import math

from meshwright.planning.graph import Graph, GraphDim, GraphTensor, Joint, Operation


class Builder:
    """Collects dims, tensors and operations by name."""

    def __init__(self, itemsize: int = 4) -> None:
        self.itemsize = itemsize
        self.dims: dict[str, GraphDim] = {}
        self.tensors: dict[str, GraphTensor] = {}
        self.operations: list[Operation] = []

    def dim(self, name: str, size: int, family: str = "") -> str:
        self.dims[name] = GraphDim(name, size, family or name)
        return name

    def tensor(self, path: str, dims: str, role: str = "activation", itemsize: int = 0) -> str:
        names = dims.split()
        places = list(self.dims)
        self.tensors[path] = GraphTensor(
            path,
            tuple(places.index(name) for name in names),
            tuple(self.dims[name].size for name in names),
            itemsize or self.itemsize,
            role,
        )
        return path

    def add(self, kind: str, operands: str, result: str, dims: str, path: str = "", **more) -> str:
        """An operation with one result. ``flops=True`` counts a product's."""
        self.tensor(result, dims)
        tensors, places = list(self.tensors), list(self.dims)
        taken = [tensors.index(name) for name in operands.split()]
        summed = tuple(places.index(name) for name in more.get("summed", "").split())
        met = {d for t in taken for d in self.tensors[tensors[t]].dims}
        met -= {places.index(given) for _, given, _ in more.get("joints", ())}
        flops = 2.0 * math.prod(self.dims[places[d]].size for d in met if d is not None)
        joints = tuple(
            Joint(tensors.index(t), places.index(g), places.index(w))
            for t, g, w in more.get("joints", ())
        )
        self.operations.append(
            Operation(
                kind,
                path or result,
                tuple(taken),
                (tensors.index(result),),
                flops=flops if kind == "dot_general" else 0.0,
                summed=summed,
                whole=tuple(places.index(name) for name in more.get("whole", "").split()),
                joints=joints,
                times=more.get("times", 1),
            )
        )
        return result

    def dot(
        self, operands: str, result: str, dims: str, summed: str, path: str = "", **more
    ) -> str:
        return self.add("dot_general", operands, result, dims, path, summed=summed, **more)

    def adam(self, path: str) -> None:
        """The update of a parameter whose gradient is ``path + "'"``."""
        tensor = self.tensors[path]
        dims = " ".join(list(self.dims)[d] for d in tensor.dims if d is not None)
        for slot in ("m", "v"):
            self.tensor(f"{path}.{slot}", dims, "slot", 4)
            self.add("add", f"{path}.{slot} {path}'", f"{path}.{slot}+", dims)
        self.add("sub", f"{path} {path}.m+ {path}.v+", f"{path}+", dims)

    def graph(self) -> Graph:
        return Graph(
            tuple(self.dims.values()), tuple(self.tensors.values()), tuple(self.operations)
        )


def mlp(batch: int = 64, features: int = 16, hidden: int = 32, adam: bool = True) -> Graph:
    """The paper's two layers, y = relu(x w) v, with gradients and updates."""
    b = Builder()
    for name, size in (("batch", batch), ("io", features), ("hidden", hidden)):
        b.dim(name, size)
    b.tensor("x", "batch io", "input")
    b.tensor("w", "io hidden", "parameter")
    b.tensor("v", "hidden io", "parameter")
    b.dot("x w", "h", "batch hidden", "io", "one/dot")
    b.add("max", "h", "r", "batch hidden", "one/relu")
    b.dot("r v", "y", "batch io", "hidden", "two/dot")
    b.add("sub", "y x", "dy", "batch io", "loss")
    b.dot("r dy", "v'", "hidden io", "batch", "two/dot")
    b.dot("dy v", "dr", "batch hidden", "io", "two/dot")
    b.add("select", "dr h", "dh", "batch hidden", "one/relu")
    b.dot("x dh", "w'", "io hidden", "batch", "one/dot")
    if adam:
        b.adam("w")
        b.adam("v")
    return b.graph()


def chain(layers: int, batch: int = 32) -> Graph:
    """Products, each smaller than the one before, none of which is worth splitting by itself."""
    b = Builder()
    b.dim("batch", batch)
    for n in range(layers + 1):
        b.dim(f"d{n}", 8 * (layers + 2 - n) if n < layers else 7)
    b.tensor("x0", "batch d0", "input")
    for n in range(layers):
        b.tensor(f"w{n}", f"d{n} d{n + 1}", "parameter")
        b.dot(f"x{n} w{n}", f"x{n + 1}", f"batch d{n + 1}", f"d{n}")
    for n in range(layers):
        b.dot(f"x{n} x{n + 1}", f"w{n}'", f"d{n} d{n + 1}", "batch")
        b.adam(f"w{n}")
    return b.graph()


def transformer(
    batch: int = 8,
    length: int = 128,
    d_model: int = 256,
    heads: int = 4,
    d_head: int = 64,
    d_ff: int = 1024,
    vocab: int = 1024,
    blocks: int = 1,
    itemsize: int = 2,
) -> Graph:
    """Blocks of attention and feed-forward between an embedding and a softmax that share it."""
    b = Builder(itemsize)
    sizes = {"batch": batch, "length": length, "keys": length, "d_model": d_model, "vocab": vocab}
    for name, size in sizes.items():
        b.dim(name, size)
    for n in range(blocks):
        for name, size in (("heads", heads), ("d_head", d_head), ("d_ff", d_ff)):
            b.dim(f"block_{n}/{name}", size, f"block/{name}")
    b.tensor("tokens", "batch length", "input", 4)
    b.tensor("embedding", "vocab d_model", "parameter")
    b.add("gather", "embedding tokens", "x0", "batch length d_model", "embed", summed="vocab")
    for n in range(blocks):
        _block(b, n)
    last = f"x{blocks}"
    b.dot(f"{last} embedding", "logits", "batch length vocab", "d_model", "head/dot")
    b.add("exp", "logits", "p", "batch length vocab", "head/softmax")
    b.add("reduce_sum", "p", "total", "batch length", "head/softmax", summed="vocab")
    b.add("div", "p total", "dlogits", "batch length vocab", "head/softmax")
    b.dot(f"{last} dlogits", "embedding'", "vocab d_model", "batch length", "head/dot")
    b.dot("dlogits embedding", f"{last}'", "batch length d_model", "vocab", "head/dot")
    for n in reversed(range(blocks)):
        _block_backward(b, n)
    b.add("scatter-add", "tokens x0'", "rows'", "vocab d_model", "embed", summed="batch length")
    for path in [path for path, tensor in b.tensors.items() if tensor.role == "parameter"]:
        b.adam(path)
    return b.graph()


def _block(b: Builder, n: int) -> None:
    at = f"block_{n}/"
    h, k, f = at + "heads", at + "d_head", at + "d_ff"
    for name in ("q", "k", "v"):
        b.tensor(f"{at}w{name}", f"d_model {h} {k}", "parameter")
    b.tensor(f"{at}wo", f"{h} {k} d_model", "parameter")
    b.tensor(f"{at}w1", f"d_model {f}", "parameter")
    b.tensor(f"{at}w2", f"{f} d_model", "parameter")
    b.dot(f"x{n} {at}wq", f"{at}q", f"batch length {h} {k}", "d_model", f"{at}attention/q")
    keys = [(f"x{n}", "length", "keys")]
    for name in ("k", "v"):
        of, dims = f"{at}attention/{name}", f"batch keys {h} {k}"
        b.dot(f"x{n} {at}w{name}", f"{at}{name}", dims, "d_model", of, joints=keys)
    b.dot(f"{at}q {at}k", f"{at}s", f"batch {h} length keys", k, f"{at}attention/s")
    b.add("exp", f"{at}s", f"{at}e", f"batch {h} length keys", f"{at}attention/e")
    b.add("reduce_sum", f"{at}e", f"{at}z", f"batch {h} length", f"{at}attention/z", summed="keys")
    b.add("div", f"{at}e {at}z", f"{at}a", f"batch {h} length keys", f"{at}attention/a")
    b.dot(f"{at}a {at}v", f"{at}c", f"batch length {h} {k}", "keys", f"{at}attention/c")
    b.dot(f"{at}c {at}wo", f"{at}o", "batch length d_model", f"{h} {k}", f"{at}attention/o")
    b.add("add", f"x{n} {at}o", f"{at}r", "batch length d_model", f"{at}residual")
    b.dot(f"{at}r {at}w1", f"{at}f", f"batch length {f}", "d_model", f"{at}ffn/one")
    b.add("max", f"{at}f", f"{at}g", f"batch length {f}", f"{at}ffn/relu")
    b.dot(f"{at}g {at}w2", f"{at}y", "batch length d_model", f, f"{at}ffn/two")
    b.add("add", f"{at}r {at}y", f"x{n + 1}", "batch length d_model", f"{at}residual")


def _block_backward(b: Builder, n: int) -> None:
    at, dx = f"block_{n}/", f"x{n + 1}'"
    h, k, f = at + "heads", at + "d_head", at + "d_ff"
    rows, scores = "batch length", f"batch {h} length keys"
    b.dot(f"{at}g {dx}", f"{at}w2'", f"{f} d_model", rows, f"{at}ffn/two")
    b.dot(f"{dx} {at}w2", f"{at}g'", f"{rows} {f}", "d_model", f"{at}ffn/two")
    b.add("select", f"{at}g' {at}f", f"{at}f'", f"{rows} {f}", f"{at}ffn/relu")
    b.dot(f"{at}r {at}f'", f"{at}w1'", f"d_model {f}", rows, f"{at}ffn/one")
    b.dot(f"{at}f' {at}w1", f"{at}r1'", f"{rows} d_model", f, f"{at}ffn/one")
    b.add("add", f"{dx} {at}r1'", f"{at}r'", f"{rows} d_model", f"{at}residual")
    b.dot(f"{at}c {at}r'", f"{at}wo'", f"{h} {k} d_model", rows, f"{at}attention/o")
    b.dot(f"{at}r' {at}wo", f"{at}c'", f"{rows} {h} {k}", "d_model", f"{at}attention/o")
    b.dot(f"{at}c' {at}v", f"{at}a'", scores, k, f"{at}attention/c")
    b.dot(f"{at}a {at}c'", f"{at}v'", f"batch keys {h} {k}", "length", f"{at}attention/c")
    b.add("mul", f"{at}a' {at}a", f"{at}s'", scores, f"{at}attention/a")
    b.dot(f"{at}s' {at}k", f"{at}q'", f"{rows} {h} {k}", "keys", f"{at}attention/s")
    b.dot(f"{at}s' {at}q", f"{at}k'", f"batch keys {h} {k}", "length", f"{at}attention/s")
    b.dot(f"x{n} {at}q'", f"{at}wq'", f"d_model {h} {k}", rows, f"{at}attention/q")
    b.dot(f"{at}q' {at}wq", f"{at}x0'", f"{rows} d_model", f"{h} {k}", f"{at}attention/q")
    keys = [(f"x{n}", "length", "keys")]
    for i, name in enumerate("kv"):
        of, dims = f"{at}attention/{name}", f"d_model {h} {k}"
        b.dot(f"x{n} {at}{name}'", f"{at}w{name}'", dims, "batch keys", of, joints=keys)
        b.dot(
            f"{at}{name}' {at}w{name}",
            f"{at}xk{i}'",
            "batch keys d_model",
            f"{h} {k}",
            f"{at}attention/{name}",
        )
        b.add(
            "add",
            f"{at}x{i}' {at}xk{i}'",
            f"{at}x{i + 1}'",
            f"{rows} d_model",
            f"{at}attention/sum",
            joints=[(f"{at}xk{i}'", "keys", "length")],
        )
    b.add("add", f"{at}r' {at}x2'", f"x{n}'", f"{rows} d_model", f"{at}residual")
