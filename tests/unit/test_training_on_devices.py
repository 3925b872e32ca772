"""Steps of E2D2, and of a policy with the model that drew, on eight devices as on one."""

import jax
import numpy as np
import optax
import pytest
from several_devices import on_eight_devices
from tiny_networks import SIZES, perturbed

from md4_jax.networks.encoder_decoder import EncoderDecoder
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.policy import Policy
from md4_jax.options import MeshOptions, TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Batch, updates_of
from md4_jax.runtime import sharding
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import shardings_of, to_global, to_host
from md4_jax.training.step import init_state, make_train_step

TOKENS = np.random.default_rng(0).integers(0, 5, (8, 8)).astype(np.int32)
ADVANTAGE = np.random.default_rng(1).normal(size=8).astype(np.float32)
BATCH = Batch(TOKENS, TOKENS >= 0, {}, reward=ADVANTAGE, advantage=ADVANTAGE)
FORM = SIZES | dict(time_conditioning=False, dropout=0.1, hidden=32)
SHARED = dict(shared_blocks=True, decoder_reads="keys_values", scan_blocks=False)
CASES = {
    "features": (EncoderDecoder, dict(decoder_depth=1), BlockDiffusion(4, weights="equal")),
    "keys and values": (EncoderDecoder, dict(decoder_depth=1, **SHARED), BlockDiffusion(4)),
    "policy": (Transformer, {}, Policy(updates=2, kl=0.1, draws=2)),
    "policy of E2D2": (EncoderDecoder, dict(decoder_depth=1), Policy(block=4, updates=2, draws=2)),
}
MESHES = (dict(data=1), dict(data=2, fsdp=2, tensor=2))


def steps(network, objective, mesh, count=3):
    """(state, metrics) after some steps from parameters far from zero, and programs compiled."""
    optimizer = optax.sgd(0.1)

    def begin():
        others = dict(taught=objective.needs.teacher, behaving=updates_of(objective) > 1)
        return init_state(jax.random.key(0), network, Masking(5), optimizer, **others)

    state = jax.device_get(jax.jit(begin)())
    far = jax.device_get(perturbed(state.params))
    others = {name: getattr(state, name) and far for name in ("teacher", "behaviour")}
    state = jax.device_put(state._replace(params=far, ema=far, **others), shardings_of(state, mesh))
    step = jit(
        make_train_step(network, objective, optimizer, TrainOptions(3, 8)), mesh, network,
        donate_argnums=0, out_shardings=(jax.tree.map(lambda x: x.sharding, state), None),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        for _ in range(count):
            state, metrics = step(state, to_global(BATCH, mesh))
    return to_host((state.params, state.behaviour, metrics)), step._cache_size()


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)


def on_meshes() -> None:
    """Takes the steps of each case on each mesh; no parameter lacks a rule for its split."""
    jax.config.update("jax_disable_most_optimizations", True)  # or it compiles for minutes
    for name, (make, options, objective) in CASES.items():
        network = make(**(FORM | options)).build()
        expected, *others = (steps(network, objective, make_mesh(MeshOptions(**m))) for m in MESHES)
        for found, programs in others:
            assert programs == 1, name
            jax.tree.map(close, found, expected[0])
        drew = jax.tree.leaves(expected[0][1])
        assert bool(drew) == (updates_of(objective) > 1), name
        assert np.isfinite(expected[0][2]["nats"]), name
    assert not sharding._warn_replicated.cache_info().misses
    print("meshes agree")


@pytest.mark.campaign
def test_parameters_and_the_model_that_drew_are_those_of_one_device():
    assert "meshes agree" in on_eight_devices("test_training_on_devices", "on_meshes")
