"""Reading collectives out of a compiled program's text, and what fits a chip."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from md4_jax import plan as plans
from md4_jax.plan import CHIPS, Plan, check_fits, collectives, devices_of, seconds, table
from md4_jax.protocols import UserError

TEXT = """HloModule jit_f

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %g = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
}

%condition (state: (s32[], f32[8,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n)
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %w = (s32[], f32[8,4]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %r = (bf16[16], bf16[2,3]) all-reduce(%a, %b), replica_groups={{0,1},{2,3}}, to_apply=%sum
  %s = f32[10]{0} reduce-scatter(%r), replica_groups=[1,8]<=[8], to_apply=%sum
  %c = f32[5]{0} collective-permute(%s), source_target_pairs={{0,1},{1,0}}
  %b = (f32[4]{0}, f32[32]{0}) all-gather-start(%p), replica_groups=[1,8]<=[8]
  %e = f32[32]{0} all-gather-done(%b)
}
"""  # noqa: E501


def test_collectives_are_counted_with_their_bytes_and_as_often_as_their_loop_runs():
    """By hand: 12 gathers of 128 bytes, 3/4 of them received; 2 x 44 / 2; 40 x 7; 20; 128 x 7/8."""
    found = collectives(TEXT)
    assert found == {
        "all-gather": (13, 12 * 128 * 3 / 4 + 128 * 7 / 8),
        "all-reduce": (1, 2 * 44 / 2),
        "reduce-scatter": (1, 40 * 7),
        "collective-permute": (1, 20),
    }


def test_a_program_compiled_here_moves_what_the_formula_says():
    """A sum over a split axis: one all-reduce of the result, 2 n (g - 1) / g bytes."""
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh = Mesh(np.array(devices), ("data",))
    split = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((len(devices) * 4, 96), jnp.float32, sharding=split)
    text = jax.jit(lambda x: jnp.sum(x, axis=0)).lower(x).compile().as_text()
    share = (len(devices) - 1) / len(devices)
    assert collectives(text) == {"all-reduce": (1, pytest.approx(2 * 96 * 4 * share))}


EXPERIMENT = types.SimpleNamespace(
    config={"network": {"remat": False}},
    train=types.SimpleNamespace(microbatches=2),
    mesh=types.SimpleNamespace(shape={"fsdp": 4}),
)


def program(gib: float) -> Plan:
    arguments, temporaries = int(gib * 2**28), int(gib * 3 * 2**28)
    return Plan(arguments, 0, temporaries, 819e9, {"all-reduce": (2, 1e11)}, 197e12, 1.0)


def test_a_program_that_is_too_large_is_refused_with_the_numbers():
    chip = CHIPS["TPU v5 lite"]
    check_fits({"train": program(15.0)}, chip, EXPERIMENT)
    words = r"the eval program needs 20.0 GiB .* has 16: 5.0 arguments and 15.0 temporaries"
    with pytest.raises(UserError, match=words) as refused:
        check_fits({"train": program(15.0), "eval": program(20.0)}, chip, EXPERIMENT)
    for word in ("network.remat=True", "train.microbatches than 2", "mesh.fsdp than 4"):
        assert word in str(refused.value)


def test_the_least_times_of_a_chip():
    """197 TFLOP, 819 GB and 100 GB on v5e: 1 s, 1 s and half a second."""
    chip = CHIPS["TPU v5 lite"]
    assert seconds(program(1.0), chip) == pytest.approx((1.0, 1.0, 0.5))
    shown = table({"train": program(1.0)}, chip)
    assert "| 256.0 MiB | 0.0 MiB | 768.0 MiB |" in shown and "2 all-reduce" in shown


@pytest.mark.parametrize("topology", ["cpu:0", "cpu:4000", "cpu:x", "v99:3x3", "nothing"])
def test_a_topology_that_there_is_not(topology, monkeypatch):
    def missing(*arguments, **more):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(UserError, match="--topology " + topology):
        devices_of(topology)


def test_the_chips_are_those_of_the_published_tables():
    """Memory in GiB and bf16 TFLOP/s of v4, v5e, v5p and v6e."""
    found = {name: (c.memory / 2**30, c.flops / 1e12) for name, c in plans.CHIPS.items()}
    assert found == {
        "TPU v4": (32, 275), "TPU v5 lite": (16, 197), "TPU v5": (95, 459), "TPU v6 lite": (32, 918)
    }  # fmt: skip
