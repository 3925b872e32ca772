"""The table from parameter path to sharding, on meshes of devices that need not be there."""

import dataclasses

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from tiny_networks import SIZES_OF

from md4_jax.networks import NETWORKS
from md4_jax.options import MeshOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import UserError
from md4_jax.runtime import sharding
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import (
    AXES,
    batch_shards,
    constrain,
    max_of_each,
    max_over_processes,
    path_name,
    shardings_of,
    spec_for,
    table,
    to_global,
    to_host,
)
from md4_jax.training.optim import OPTIMIZERS
from md4_jax.training.step import init_state

MESH = AbstractMesh((2, 4, 1, 2), AXES)
ONE = make_mesh(MeshOptions(data=1))


@pytest.mark.parametrize(
    "name, shape, spec",
    [
        ("network/blocks/attention/query/kernel", (3, 8, 8), P(None, "fsdp", "tensor")),
        ("network/blocks_1/attention/query/kernel", (8, 8), P("fsdp", "tensor")),
        ("network/blocks_1/attention/out/kernel", (8, 8), P("tensor", "fsdp")),
        ("network/blocks_1/feed_forward/up/kernel", (8, 8), P("fsdp", "tensor")),
        ("network/blocks_1/feed_forward/down/kernel", (8, 8), P("tensor", "fsdp")),
        ("network/embedding", (128, 8), P("tensor", "fsdp")),
        ("network/head/kernel", (8, 128), P("fsdp", "tensor")),
        ("network/head/bias", (128,), P("tensor")),
        ("network/time/time_in/bias", (7,), P(None)),
        ("network/final_norm/scale", (7,), P(None)),
        ("step", (), P()),
        ("opt_state/1/0/mu/network/embedding", (128, 8), P("tensor", "fsdp")),
    ],
)
def test_the_table(name, shape, spec):
    assert spec_for(name, shape, MESH) == spec


SPLIT_BY_BATCH = AbstractMesh((8, 1, 1, 1), AXES)


@pytest.mark.parametrize(
    "mesh, shape",
    [
        (MESH, (4, 4)),
        (MESH, (512, 512)),
        (SPLIT_BY_BATCH, (513, 512)),
        (ONE, (9999, 512)),
        (ONE, (7,)),
    ],
)
def test_an_unknown_parameter_is_not_split_and_said_once(mesh, shape, capsys):
    sharding._warn_replicated.cache_clear()
    for copy in ("params", "ema", "opt_state/1/0/mu"):
        assert spec_for(f"{copy}/network/mine/new", shape, mesh) == P(*(None,) * len(shape))
    said = capsys.readouterr().err
    assert said.startswith(f"warning: no rule says how to split network/mine/new {shape}")
    axes = "'fsdp', 'tensor'" if len(shape) == 2 else "None"
    assert said.count("\n") == 1 and f'(r"mine/new$", P({axes}))' in said


@pytest.mark.parametrize("mesh", [MESH, AbstractMesh((2, 4, 1, 1), AXES)])
@pytest.mark.parametrize("shape", [(513, 512), (3, 512, 512)])
def test_a_large_unknown_parameter_is_refused_where_others_are_split(mesh, shape):
    with pytest.raises(
        UserError, match="no rule says how to split network/mine/new .* mesh.fsdp=4"
    ) as said:
        spec_for("opt_state/mu/network/mine/new", shape, mesh)
    assert """(r"mine/new$", P('fsdp', 'tensor'))""" in str(said.value)
    assert ("mesh.tensor=2" in str(said.value)) == (mesh is MESH)


def test_an_uneven_split_is_refused_with_its_numbers():
    with pytest.raises(
        UserError, match=r"head/kernel has a dimension of 6, which is not a multiple of mesh.fsdp=4"
    ):
        spec_for("network/head/kernel", (6, 128), MESH)


@pytest.mark.quick(16)
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, dict(scan_blocks=False, qk_norm=True), dict(lora_rank=4)])
@pytest.mark.cases(18)
def test_every_array_of_a_state_has_a_place(network, optimizer, options, capsys):
    """The copies of a parameter in the optimizer and the average lie as the parameter does."""
    sharding._warn_replicated.cache_clear()
    fields = {field.name for field in dataclasses.fields(network)}
    own = {key: value for key, value in options.items() if key in fields}
    if getattr(network, "classifies", False):  # its head would not be trained
        own.pop("lora_rank", None)
    net = network(**(SIZES_OF[network] | own)).build()
    transformation, _ = optimizer(warmup_steps=0).build(10)
    state = jax.eval_shape(lambda: init_state(jax.random.key(0), net, Masking(5), transformation))
    parameters = {
        path_name(p): spec_for(path_name(p), leaf.shape, MESH)
        for p, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    }
    copies = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        spec = spec_for(path_name(path), leaf.shape, MESH)
        for name, expected in parameters.items():
            if path_name(path).endswith(name) and leaf.shape:
                copies += 1
                assert spec == expected
    assert copies >= 3 * len(parameters)
    assert any("tensor" in spec for spec in parameters.values())
    assert capsys.readouterr().err == ""  # a rule for each


def test_a_mesh_has_all_axes_and_counts_its_batch_shards():
    assert ONE.axis_names == ("data", "fsdp", "context", "tensor") and ONE.size == 1
    assert batch_shards(ONE) == 1 and batch_shards(MESH) == 8


@pytest.mark.parametrize(
    "options, words",
    [
        (MeshOptions(fsdp=0), "mesh.fsdp must be at least 1, not 0"),
        (
            MeshOptions(tensor=64),
            "data=1 x fsdp=1 x context=1 x tensor=64 needs 64 devices, but there are",
        ),
        (MeshOptions(data=50, fsdp=2), "data=50 x fsdp=2 x context=1 x tensor=1 needs 100 devices"),
    ],
)
def test_too_few_devices(options, words):
    with pytest.raises(UserError, match=words):
        make_mesh(options, jax.devices()[:1])


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a mesh asks of a device."""

    platform: str
    device_kind: str
    slice_index: int
    core_on_chip: int
    coords: tuple[int, int, int]
    process_index: int
    id: int


def chips(slices: int):
    """Slices of 4 x 4 chips, numbered slice by slice and row by row."""
    return [
        Chip(
            platform="tpu", device_kind="TPU v5 lite", slice_index=number, core_on_chip=0,
            coords=(x, y, 0), process_index=4 * number + y, id=16 * number + 4 * y + x,
        )
        for number in range(slices) for y in range(4) for x in range(4)
    ]  # fmt: skip


def test_neighbours_on_an_axis_are_neighbours_in_the_machine():
    mesh = make_mesh(MeshOptions(fsdp=4), chips(1))
    for row in mesh.devices[:, :, 0, 0]:
        places = np.array([chip.coords for chip in row])
        assert np.ptp(places, axis=0).tolist() in ([3, 0, 0], [0, 3, 0])  # a ring of the torus


def test_slices_lie_along_data():
    mesh = make_mesh(MeshOptions(fsdp=8, tensor=2), chips(2))
    assert mesh.devices.shape == (2, 8, 1, 2)
    for number in range(2):
        assert {chip.slice_index for chip in mesh.devices[number].ravel()} == {number}
    with pytest.raises(UserError, match="mesh.data=1 must be a multiple of the 2 TPU slices"):
        make_mesh(MeshOptions(fsdp=32), chips(2))


def test_rows_of_the_host_become_one_array_and_come_back():
    batch = exact.batch_of(np.arange(12).reshape(4, 3), segments=np.zeros((4, 3), np.int32))
    placed = to_global(batch, ONE)
    assert isinstance(placed.tokens, jax.Array) and placed.tokens.sharding.mesh == ONE
    np.testing.assert_array_equal(to_host(placed).tokens, batch.tokens)


def test_constrain_is_the_identity_without_a_mesh_and_pins_with_one():
    x = jnp.ones((4, 2))
    assert constrain(x, "data", None) is x
    with jax.set_mesh(ONE):
        out = jax.jit(lambda x: constrain(x, ("data", "fsdp"), None))(x)
    np.testing.assert_array_equal(out, x)


def test_one_process_asks_nobody():
    assert max_over_processes(15) == 15 and max_of_each([3, 0]) == [3, 0]


def test_the_printed_table_names_every_parameter():
    params = {"network": {"embedding": jnp.zeros((128, 8))}}
    text = table(params, MESH)
    assert "network/embedding" in text and "(128, 8)" in text
    assert "0.000 MiB" in text  # 4 KiB over eight devices
    assert jax.tree.leaves(shardings_of(params, ONE))[0].mesh == ONE
