"""Two products over a split dim that a program adds: what it would win to sum them once on CPUs.

``apart`` is what a program writes, ``stacked`` one product of both, ``first added`` adds the parts
of each device by hand. CPU time of this process, which does not depend much on what others compute.

    python benchmarks/added_products.py
"""

from __future__ import annotations

import time
from typing import Any

from quiet import Quiet

import meshwright as mw

ROWS, HIDDEN, IO = 512, 4096, 1024  # each sum is of 524,288 elements
ROUNDS, CALLS = 12, 5


def ways() -> dict[str, Any]:
    """The compiled functions, of four arrays that are split over eight devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as Spec

    mesh = mw.create_mesh({"all": 8}).jax_mesh
    whole = jax.sharding.NamedSharding(mesh, Spec())

    def product(x: Any, w: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, whole)

    def apart(x: Any, w: Any, y: Any, v: Any) -> Any:
        return product(x, w) + product(y, v)

    def stacked(x: Any, w: Any, y: Any, v: Any) -> Any:
        return jnp.einsum("bnh,nhi->bi", jnp.stack([x, y], 1), jnp.stack([w, v]))

    specs = (Spec(None, "all"), Spec("all", None)) * 2
    first_added = jax.shard_map(
        lambda x, w, y, v: jax.lax.psum(x @ w + y @ v, "all"),
        mesh=mesh,
        in_specs=specs,
        out_specs=Spec(),
    )
    named = {"apart": apart, "stacked": stacked, "first added": first_added}
    return {name: jax.jit(way, out_shardings=whole) for name, way in named.items()}


def main() -> None:
    mw.virtual_devices(8)
    import jax

    mesh = mw.create_mesh({"all": 8})
    layouts = [mw.Layout(specs, mesh) for specs in ([None, "all"], ["all", None])] * 2
    shapes = [(ROWS, HIDDEN), (HIDDEN, IO)] * 2
    arrays = [
        jax.device_put(jax.random.normal(jax.random.key(number), shape), layout.sharding)
        for number, (shape, layout) in enumerate(zip(shapes, layouts, strict=True))
    ]
    functions, least, quiet = ways(), {}, Quiet.wait()
    for _ in range(ROUNDS):
        for name, function in functions.items():
            begin = time.process_time()
            for _ in range(CALLS):
                function(*arrays).block_until_ready()
            taken = (time.process_time() - begin) / CALLS
            least[name] = min(taken, least.get(name, taken))
    for name, taken in least.items():
        print(f"{name}: {1e3 * taken:.1f} ms of CPU time")
    print(quiet.line())


if __name__ == "__main__":
    main()
