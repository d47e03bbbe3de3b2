"""Which devices a program is traced for. Its mesh decides, not the process's default backend.

A program for a TPU can be traced and compiled where there is none (``hexllm plan``), and there
JAX's default backend is the CPU. Whoever traces a step says which mesh it is for; the operations
below ask here.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax.sharding import Mesh

#: The mesh axis that tensor parallelism divides.
TENSOR_AXIS = "tensor"

_mesh: ContextVar[Mesh | None] = ContextVar("hexllm_mesh", default=None)


@contextmanager
def traced_for(mesh: Mesh | None) -> Iterator[None]:
    """Trace what follows, on this thread, for the devices of ``mesh``; None is the default one."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def mesh() -> Mesh | None:
    """Return the mesh that is traced for; None outside ``traced_for``."""
    return _mesh.get()


def platform() -> str:
    """Return the platform that is traced for: ``cpu``, ``tpu`` or ``gpu``."""
    current = _mesh.get()
    if current is None:
        return str(jax.default_backend())
    return str(current.devices.flat[0].platform)


def device_kind() -> str:
    """Return JAX's name of the chip that is traced for, like ``TPU v5 lite``."""
    current = _mesh.get()
    device = jax.devices()[0] if current is None else current.devices.flat[0]
    return str(device.device_kind)


def tensor_shards() -> int:
    """Return over how many devices heads are dealt out."""
    current = _mesh.get()
    return 1 if current is None else int(current.shape[TENSOR_AXIS])
