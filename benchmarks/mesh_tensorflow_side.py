"""The peer: Mesh-TensorFlow 0.1.21 on eight logical CPU devices, in an environment of its own.

The same einsums as ours, in its own language; parameters and data are its variables, so that
nothing is imported into the mesh from one step to the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from mesh_tensorflow_import import mtf
from named_jobs import (
    DATA,
    DEVICES,
    DIMS,
    LEARNING_RATE,
    PARAMETERS,
    NamedJob,
    initial,
)
from named_protocol import job_from_arguments, measure

INTRA_OP_THREADS = 1


class Program:
    """The job's program as a Mesh-TensorFlow graph."""

    def __init__(self, job: NamedJob) -> None:
        self.mesh = mtf.Mesh(mtf.Graph(), "mesh")
        self.dims = {name: mtf.Dimension(name, size) for name, size in DIMS[job.program].items()}
        values, x, y = initial(job)
        self.params = {
            name: self.variable(name, dims, values[name])
            for name, dims in PARAMETERS[job.program].items()
        }
        self.x, self.y = (
            self.variable(name, DATA[job.program], value, trainable=False)
            for name, value in (("x", x), ("y", y))
        )
        outputs = getattr(self, job.program)()
        self.loss = mtf.reduce_mean(mtf.square(outputs - self.y))

    def shape(self, dims: str) -> Any:
        return mtf.Shape([self.dims[dim] for dim in dims.split()])

    def variable(self, name: str, dims: str, value: np.ndarray, trainable: bool = True) -> Any:
        return mtf.get_variable(
            self.mesh,
            name,
            self.shape(dims),
            initializer=tf.constant_initializer(value),
            trainable=trainable,
        )

    def mlp(self) -> Any:
        hidden = mtf.relu(mtf.einsum([self.x, self.params["w"]], self.shape("batch hidden")))
        return mtf.einsum([hidden, self.params["v"]], self.shape("batch io"))

    def block(self) -> Any:
        x = self.x + self.attention(self.normalised(self.x, self.params["scale_1"]))
        inner = self.normalised(x, self.params["scale_2"])
        hidden = mtf.relu(mtf.einsum([inner, self.params["wi"]], self.shape("batch length d_ff")))
        return x + mtf.einsum([hidden, self.params["wo"]], self.shape("batch length d_model"))

    def normalised(self, x: Any, scale: Any) -> Any:
        over = self.dims["d_model"]
        x = x - mtf.reduce_mean(x, reduced_dim=over)
        return x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=over) + 1e-6) * scale

    def attention(self, x: Any) -> Any:
        heads = self.shape("batch length heads d_kv")
        q, k, v = (mtf.einsum([x, self.params[name]], heads) for name in "qkv")
        memory = mtf.Dimension("memory", self.dims["length"].size)
        k, v = (mtf.rename_dimension(each, "length", "memory") for each in (k, v))
        scores = mtf.einsum(
            [q * self.dims["d_kv"].size ** -0.5, k],
            mtf.Shape([*self.shape("batch heads length").dims, memory]),
        )
        weights = mtf.softmax(scores, memory)
        mixed = mtf.einsum([weights, v], heads)
        return mtf.einsum([mixed, self.params["o"]], self.shape("batch length d_model"))


def main() -> None:
    job = job_from_arguments(__doc__)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()  # with reference variables its losses vary from run to run
    program = Program(job)
    graph = program.mesh.graph
    variables = list(program.params.values())
    gradients = mtf.gradients([program.loss], variables)
    updates = [
        mtf.assign_sub(variable, gradient * LEARNING_RATE)
        for variable, gradient in zip(variables, gradients, strict=True)
    ]
    implementation = mtf.placement_mesh_impl.PlacementMeshImpl(
        mtf.convert_to_shape(job.mesh),
        mtf.convert_to_layout_rules(job.layout),
        [f"cpu:{i}" for i in range(DEVICES)],
    )
    lowering = mtf.Lowering(graph, {program.mesh: implementation})
    loss = tf.to_float(lowering.export_to_tf_tensor(program.loss))
    step = [loss, *(lowering.lowered_operation(update) for update in updates)]
    config = tf.ConfigProto(
        device_count={"CPU": DEVICES}, intra_op_parallelism_threads=INTRA_OP_THREADS
    )
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        fetch = session.make_callable(step)
        measure("mesh_tensorflow", job, lambda: fetch()[0], float)


if __name__ == "__main__":
    main()
