"""What XLA is told besides the program, by platform: the one place for it."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

# cpu: matrix products are left to Eigen. XLA's default, fusing them into calls of YNNPACK, made a
# step of 16 x 256 tokens at width 256 a tenth slower and its temporaries a third larger.
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "gpu": {},
    "tpu": {},
}


def jit(fn: Callable, mesh: Mesh, **arguments: Any) -> Callable:
    """jax.jit with the options of the platform whose devices the mesh has."""
    return jax.jit(fn, compiler_options=OPTIONS[mesh.devices.flat[0].platform], **arguments)
