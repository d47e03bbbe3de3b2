"""Small programs for a TPU, whose cost is plain: compiled by tests, and kept as ``modules/*.gz``.

``python -m tests.plan.programs v5e`` compiles them all again with the installed libtpu.
"""

from __future__ import annotations

import gzip
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, shard_map
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from hexllm.plan.topology import devices, parse_topology

MODULES = Path(__file__).parent / "modules"


def matmul(a, b):
    return a @ b


def mlp(x, ws):
    for up, down in ws:
        x = x + jax.nn.silu(x @ up) @ down
    return x


def scan(x, w):
    return lax.scan(lambda x, w: (jax.nn.silu(x @ w), None), x, w)[0]


def cond(p, x, w):
    return lax.cond(p, lambda x: x @ w, lambda x: x * 2, x)


def gather(pool, tables, update, slots):
    pool = pool.at[slots].set(update)
    return pool, pool[tables].sum(1)


def einsums(a, b, c, d):
    """A batched product [8, 64, 512] × [8, 512, 256], and one that contracts two axes."""
    return jnp.einsum("bij,bjk->bik", a, b), jnp.einsum("tnh,nhd->td", c, d)


def double(x, o):
    o[...] = x[...] * 2


def pallas(x, w):
    block = pl.BlockSpec((512, 4096), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(
        double, out_shape=shape, grid=(8,), in_specs=[block], out_specs=block, name="double"
    )
    return call(x) @ w


def tensor_parallel(x, a, b):
    return jax.nn.silu(x @ a) @ b


def collectives(x):
    summed = lax.psum(x, "t")
    gathered = lax.all_gather(x * 2, "t", tiled=True)
    scattered = lax.psum_scatter(x * 3, "t", tiled=True)
    exchanged = lax.all_to_all(x, "t", 0, 1, tiled=True)
    return summed, gathered, scattered, exchanged


def permute(x):
    return lax.ppermute(x, "t", [(0, 1), (1, 2), (2, 3), (3, 0)])


def lower(name: str, topology: str):
    """Trace a program for a topology, most of them for one chip of it."""
    chips = devices(parse_topology(topology))
    one = SingleDeviceSharding(chips[0])
    mesh = Mesh(np.array(chips), ("t",))

    def array(*shape, dtype=jnp.bfloat16, spec=None):
        sharding = one if spec is None else NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    mapped = partial(shard_map, mesh=mesh, in_specs=P(None, "t"), check_vma=False)
    columns = array(4096, 4096, dtype=jnp.float32, spec=(None, "t"))
    int32 = jnp.int32
    match name:
        case "matmul":
            args = (matmul, array(2048, 4096), array(4096, 7168))
        case "mlp":
            args = (mlp, array(64, 4096), [(array(4096, 8192), array(8192, 4096))] * 4)
        case "scan":
            args = (scan, array(64, 4096), array(12, 4096, 4096))
        case "cond":
            args = (cond, array(dtype=jnp.bool_), array(64, 4096), array(4096, 4096))
        case "gather":
            tables, slots = array(64, 1024, dtype=int32), array(64, dtype=int32)
            args = (gather, array(131072, 1024), tables, array(64, 1024), slots)
        case "einsums":
            args = (einsums, array(8, 64, 512), array(8, 512, 256))
            args += (array(64, 8, 128), array(8, 128, 4096))
        case "pallas":
            args = (pallas, array(4096, 4096), array(4096, 4096))
        case "tensor_parallel":
            args = (tensor_parallel, array(64, 4096, spec=()), array(4096, 8192, spec=(None, "t")))
            args += (array(8192, 4096, spec=("t", None)),)
        case "collectives":
            specs = (P(), P(None, "t"), P(None, "t"), P(None, "t"))
            args = (mapped(collectives, out_specs=specs), columns)
        case "permute":
            args = (mapped(permute, out_specs=P(None, "t")), columns)
        case _:
            raise ValueError(name)
    function, *shapes = args
    return jax.jit(function, donate_argnums=(0,) if name == "gather" else ()).lower(*shapes)


#: What is kept: every program but those that only tests which compile look at.
KEPT = (
    *("matmul", "mlp", "scan", "cond", "gather", "pallas"),
    *("tensor_parallel", "collectives", "permute"),
)


def stored(name: str) -> str:
    """Return the text of a program as libtpu 0.0.42 compiled it for a v5e."""
    return gzip.decompress((MODULES / f"{name}.hlo.gz").read_bytes()).decode()


def main() -> None:
    MODULES.mkdir(exist_ok=True)
    for name in KEPT:
        text = lower(name, f"{sys.argv[1]}:2x2").compile().as_text()
        path = MODULES / f"{name}.hlo.gz"
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(path, len(text), path.stat().st_size)


if __name__ == "__main__":
    main()
