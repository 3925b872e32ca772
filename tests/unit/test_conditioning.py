"""What a network is told of the time: process.conditioning = time, alpha, sigma or zero."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import random_parameters

from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.md4 import MD4
from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import Geometric, Linear, LogLinear
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Accelerator, Blockwise, Denoiser, Network, UserError

pytestmark = pytest.mark.slow

PROCESSES = [Masking, Uniform, Transition, Rates]
# Of the linear schedule at t = 0, 0.3 and 0.8.
TOLD = {"time": [0.0, 0.3, 0.8], "alpha": [1.0, 0.7, 0.2], "sigma": [0.0, 0.35667494, 1.6094379]}
TOLD["zero"] = [0.0, 0.0, 0.0]
T = jnp.asarray([0.0, 0.3, 0.8])


@pytest.mark.parametrize("conditioning", TOLD)
@pytest.mark.parametrize("make", PROCESSES)
def test_known_values(make, conditioning):
    signal = make(4, conditioning=conditioning).signal(T)
    np.testing.assert_allclose(signal, TOLD[conditioning], rtol=1e-6)


@pytest.mark.parametrize("conditioning", TOLD)
def test_it_is_elementwise_and_finite_at_both_ends(conditioning):
    """Of any shape, also where alpha is 0, and sigma keeps its digits near t = 0."""
    for schedule in (Linear(), Geometric(), LogLinear()):
        process = Masking(4, schedule, conditioning)
        told = jax.jit(process.signal)(jnp.asarray([[0.0, 1e-7], [0.5, 1.0]]))
        assert told.shape == (2, 2) and told.dtype == jnp.float32 and np.isfinite(told).all()
    tiny = float(np.log(np.finfo(np.float32).tiny))
    assert float(Masking(4, conditioning="sigma").signal(jnp.ones(()))) == pytest.approx(-tiny)
    early = Masking(4, conditioning="sigma").signal(jnp.float32(1e-7))
    np.testing.assert_allclose(early, 1e-7, rtol=1e-6)


def test_sigma_is_the_exponent_of_the_geometric_schedule():
    """SEDD's sigma_bar = minimum^(1 - t) maximum^t, also where alpha is nearly 1."""
    process = Masking(4, Geometric(1e-3, 20.0), "sigma")
    expected = 1e-3 ** (1.0 - np.asarray(T, np.float64)) * 20.0 ** np.asarray(T, np.float64)
    np.testing.assert_allclose(process.signal(T), expected, rtol=1e-5)


@pytest.mark.parametrize("make", PROCESSES)
def test_another_value_is_refused(make):
    words = "process.conditioning must be one of time, alpha, sigma, zero, not 'noise'"
    with pytest.raises(UserError, match=words):
        make(4, conditioning="noise")


def test_with_a_schedule_for_each_symbol_it_is_the_time():
    np.testing.assert_array_equal(StateDependent(4).init().signal(T), T)


def recording(seen: list) -> Network:
    """A network that writes down the times that it is told."""

    def bind(params, context, keys):
        def features(z, t, index=None):
            seen.append(t)
            return jnp.zeros((*(z if index is None else index).shape, 4))

        def blocks(z, t, clean, block, clean_t):
            seen.extend([t, clean_t])
            return jnp.zeros((*z.shape, 4))

        def append_block(z, t, cache):
            seen.append(t)
            return jnp.zeros((*z.shape, 4)), cache

        return Denoiser(
            features,
            lambda h: h,
            Accelerator(features_at=features),
            Blockwise(blocks, None, append_block, read_block=append_block),
            lambda count: bind(params, context, keys),
        )

    return Network(lambda key: {}, bind, time_free=False, blockwise=True)


@pytest.mark.parametrize("conditioning", TOLD)
def test_every_way_to_ask_a_network_is_told_it(conditioning):
    """features, features at some positions, blocks with their clean half, a cache, repeated."""
    seen, z = [], jnp.zeros((3, 4), jnp.int32)
    params = {"network": {}, "process": Masking(4, conditioning=conditioning)}
    denoiser = recording(seen).denoiser(params)
    for asked in (denoiser, denoiser.repeated(2)):
        seen.clear()
        asked(z, T)
        asked.features_at(z, T, jnp.zeros((3, 1), jnp.int32))
        asked.blocks.features(z, jnp.stack([T, T], axis=1), z, 2)
        asked.blocks.append_block(z, T, None)
        asked.blocks.read(z, T, None)
        whole, some, grouped, clean, appended, read = map(np.asarray, seen)
        for told in (whole, some, grouped[:, 0], grouped[:, 1], appended, read):
            np.testing.assert_allclose(told, TOLD[conditioning], rtol=1e-6)
        np.testing.assert_allclose(clean, 1.0 if conditioning == "alpha" else 0.0)


@pytest.mark.parametrize("conditioning", TOLD)
def test_objectives_reach_the_network_with_it(conditioning):
    """MD4 at u = 0, 0.3 and 0.8, and block diffusion; the weights of a loss do not follow it."""
    seen, batch = [], exact.batch_of(np.zeros((3, 4)))
    process = Masking(4, conditioning=conditioning)
    denoiser = recording(seen).denoiser({"network": {}, "process": process})
    nats, _ = MD4()(denoiser, process, batch, T, exact.keys_for(0, 3))
    np.testing.assert_allclose(seen[0], TOLD[conditioning], rtol=1e-6, atol=1e-7)
    plain, _ = MD4()(denoiser, Masking(4), batch, T, exact.keys_for(0, 3))
    np.testing.assert_array_equal(nats, plain)
    seen.clear()
    noise = jnp.stack([T, T], axis=1)
    BlockDiffusion(2, "times").loss_at(denoiser, process, batch, jnp.full((3, 4), 4), noise)
    np.testing.assert_allclose(seen[0][:, 1], TOLD[conditioning], rtol=1e-6)


def test_a_transformer_told_alpha_is_one_told_that_time():
    """Of the linear schedule alpha_t = 1 - t: the same features at t as another's at 1 - t."""
    network = Transformer(5, size=16, depth=1, heads=2, hidden=24, scan_blocks=False).build()
    params = random_parameters(network)
    z = jnp.asarray([[0, 5, 2, 3]] * 3)
    plain, alpha = (
        network.denoiser({"network": params, "process": Masking(5, conditioning=name)})
        for name in ("time", "alpha")
    )
    np.testing.assert_allclose(alpha(z, T), plain(z, 1.0 - T), atol=1e-5)
    assert np.abs(alpha(z, T) - plain(z, T)).max() > 1e-2
