"""What --mode plan says of forced CPU devices beside what the compiler counts."""

import json

import pytest

from md4_jax.runtime.sharding import AXES

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

SIZES = (
    *("network.size=256", "network.heads=4", "network.depth=2", "network.scan_blocks=False"),
    *("network.time_conditioning=False", "train.batch_size=32", "data.length=256"),
    *("plan.random_tokens=27", "plan.parts=train"),
)
SOME = ("2x2x1x2", "8x1x1x1", "1x8x1x1", "1x1x8x1")
MESHES = ("2x1x2x2", *(pytest.param(mesh, marks=pytest.mark.campaign) for mesh in SOME))


@pytest.mark.campaign
@pytest.mark.parametrize("mesh", MESHES)
def test_flops_and_bytes_are_those_of_the_compiled_program(mesh, program):
    """Without loops, which the compiler counts once: FLOPs to 3%, bytes to 1%."""
    sizes = zip(AXES, mesh.split("x"), strict=True)
    words = (*SIZES, *(f"mesh.{axis}={size}" for axis, size in sizes))
    ended = program(
        *("--mode", "plan", "--config", "configs/base.py", "--topology", "cpu:8"),
        *(f"--config.{word}" for word in words),
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        JAX_DISABLE_MOST_OPTIMIZATIONS="false",
        JAX_ENABLE_COMPILATION_CACHE="false",  # a kept program may have other names of scopes
    )
    assert ended.code == 0, ended
    train = json.loads(ended.out.splitlines()[-1])["train"]
    assert train["flops"] == pytest.approx(train["counted"], rel=0.03)
    assert train["moved"] == pytest.approx(train["accessed"], rel=0.01)
    assert "Involuntary full rematerialization" not in ended.err
