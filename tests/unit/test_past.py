"""Sampling from left to right with keys and values kept: the draws of whole evaluations."""

import inspect

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import random_parameters

from md4_jax.networks.blocks import KVCache, Surroundings
from md4_jax.networks.blocks import LeftToRight as LeftToRightCache
from md4_jax.networks.cache import Cache
from md4_jax.networks.ordered import RankedCache
from md4_jax.networks.past import Past
from md4_jax.networks.transformer import Transformer
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Prompt
from md4_jax.samplers.grids import cosine, uniform
from md4_jax.samplers.guidance import guided
from md4_jax.samplers.left_to_right import LeftToRight
from md4_jax.samplers.loop import no_prompt, sample
from md4_jax.samplers.transforms import Transform

V, L, ROWS = 5, 9, 4
SIZES = dict(size=16, depth=2, heads=4, hidden=32, causal=True, time_conditioning=False)
KINDS = {
    "plain": dict(scan_blocks=False),
    "scanned": dict(scan_blocks=True, qk_norm=True),
    "few keys": dict(scan_blocks=False, kv_heads=2, qkv_bias=True),
    "learned positions": dict(scan_blocks=True, positions=L + 2, out_bias=True),
    "convolution": dict(scan_blocks=False, local_width=3),
    "scanned convolution": dict(scan_blocks=True, local_width=4),
    "time": dict(scan_blocks=False, time_conditioning=True),
    "experts": dict(scan_blocks=True, experts=4, expert_hidden=8, dense_layers=1),
    "rounded": dict(scan_blocks=False, products="bfloat16"),
}


def made(**options):
    """A network away from its initial values, and its parameters."""
    network = Transformer(V, **SIZES | options).build()
    return network, {"network": random_parameters(network), "process": Masking(V)}


def both(denoiser, prompt, grid, step=None):
    """(chain, frames) with the cache and without."""
    step = LeftToRight() if step is None else step
    keys = exact.keys_for(7, ROWS)

    def drawn(denoiser):
        return sample(denoiser, Masking(V), step, grid=grid, keys=keys, prompt=prompt, trace=2)

    return tuple(
        jax.jit(lambda d=d: drawn(d))() for d in (denoiser, denoiser._replace(blocks=None))
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cases(2)
def test_tokens_one_by_one_have_the_features_of_the_whole_text(kind):
    """One at a time, then three at once, then the rest; bfloat16 rounds other sums than float32."""
    network, params = made(**KINDS[kind])
    denoiser = network.denoiser(params)
    z, t = jax.random.randint(jax.random.key(2), (ROWS, L), 0, V + 1), jnp.zeros(ROWS)
    whole = denoiser.features(z, t)
    append = jax.jit(denoiser.blocks.append_block)
    cache, parts = denoiser.blocks.empty_cache(ROWS, L + 2), []
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, L)):
        h, cache = append(z[:, begin:end], t, cache)
        parts.append(h)
    far = 0.05 if kind == "rounded" else 2e-5
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=far)
    assert int(cache.count) == L


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "kind, grid",
    [
        ("plain", uniform(1)),
        ("convolution", cosine(3)),
        ("scanned", uniform(30)),
        ("learned positions", uniform(2)),
    ],
)
@pytest.mark.cases(1)
def test_samples_and_their_paths_are_those_of_whole_evaluations(kind, grid):
    network, params = made(**KINDS[kind])
    fixed = np.zeros((ROWS, L), bool)
    fixed[:, 3] = fixed[1, :2] = fixed[2, 7:] = fixed[:, 8] = True
    tokens = np.arange(ROWS * L).reshape(ROWS, L) % V
    prompt = Prompt(tokens.astype(np.int32), fixed)
    (kept, path), (whole, others) = both(network.denoiser(params), prompt, grid)
    assert (np.asarray(kept.evaluations) == L - 2).all()  # all fix positions 3 and 8
    np.testing.assert_array_equal(kept.z, whole.z)
    np.testing.assert_array_equal(kept.evaluations, whole.evaluations)
    np.testing.assert_allclose(kept.confidence, whole.confidence, atol=1e-5)
    np.testing.assert_array_equal(path.z, others.z)
    np.testing.assert_allclose(path.confidence, others.confidence, atol=1e-5)


@pytest.mark.parametrize("cls", [KVCache, LeftToRightCache, Surroundings, Past, RankedCache])
def test_a_layer_calls_all_caches_alike(cls):
    """Their `attend` has the parameters of the protocol."""
    own, asked = (inspect.signature(each.attend) for each in (cls, Cache))
    assert [*own.parameters.values()] == [*asked.parameters.values()]
    assert {"keys", "values", "first", "append"} <= set(dir(cls))


class Own:
    """A step of another class that says what it is able to do."""

    needs, level, transform = LeftToRight.needs, None, LeftToRight().transform
    __call__, filled_in, is_cached, inputs = (
        getattr(LeftToRight, name) for name in ("__call__", "filled_in", "is_cached", "inputs")
    )
    positions_read = LeftToRight.positions_read

    def fill_cached(self, denoiser, process, chain, keys_of):
        return LeftToRight(self.transform).fill_cached(denoiser, process, chain, keys_of)


def test_a_step_of_another_class_fills_with_a_cache(monkeypatch):
    calls, fill = [], Own.fill_cached
    monkeypatch.setattr(Own, "fill_cached", lambda *a: calls.append(1) or fill(*a))
    network, params = made(scan_blocks=False)
    (kept, _), (whole, _) = both(network.denoiser(params), no_prompt(ROWS, L), uniform(3), Own())
    np.testing.assert_array_equal(kept.z, whole.z)
    assert calls == [1]


@pytest.mark.campaign
def test_choices_of_tokens_and_guidance_are_kept():
    network, params = made(scan_blocks=False, classes=2, label_dropout=0.1)
    label = {"label": jnp.array([0, 1, 1, 0])}
    denoiser, _ = guided(network, params, label, 2.0)
    step = LeftToRight(Transform(temperature=0.7, top_k=3))
    (kept, _), (whole, _) = both(denoiser, no_prompt(ROWS, L), uniform(3), step)
    np.testing.assert_array_equal(kept.z, whole.z)
    assert len(np.unique(np.asarray(kept.z), axis=0)) == ROWS


@pytest.mark.slow
def test_an_evaluation_reads_one_token():
    """FLOPs of the loop's body, counted by the compiler, are those of 1 of 64 tokens and less than
    twice as many: the whole text would be 64 times as many."""
    network = Transformer(V, **SIZES | dict(size=64, hidden=128, scan_blocks=False)).build()
    params = {"network": random_parameters(network), "process": Masking(V)}

    def flops(denoiser):
        def drawn(keys):
            prompt = no_prompt(ROWS, 64)
            return sample(
                denoiser, Masking(V), LeftToRight(), grid=uniform(1), keys=keys, prompt=prompt
            )[0]

        # XLA counts the body of a loop once.
        return jax.jit(drawn).lower(exact.keys_for(0, ROWS)).compile().cost_analysis()["flops"]

    denoiser = network.denoiser(params)
    assert flops(denoiser) < flops(denoiser._replace(blocks=None)) / 8


@pytest.mark.parametrize("options", [dict(tables=640), dict(causal=False, local_width=3)])
def test_networks_that_need_the_whole_text_keep_nothing(options):
    network = Transformer(V, **SIZES | dict(scan_blocks=False) | options).build()
    assert not network.blockwise
    params = {"network": random_parameters(network), "process": Masking(V)}
    if network.companion is not None:
        params["companion"] = network.companion.init()
    assert network.denoiser(params).blocks is None
