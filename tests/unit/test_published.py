"""Networks of other projects: with their parameters ours returns their outputs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import networks
from md4_jax.networks import published
from md4_jax.networks.transformer import Transformer
from md4_jax.processes.schedules import LogLinear
from md4_jax.processes.uniform import Uniform

safetensors = pytest.importorskip("safetensors.numpy")
PEERS = Path(__file__).parents[3] / "shared" / "peers"
pytestmark = pytest.mark.skipif(not PEERS.exists(), reason="needs the instances in ../shared/peers")
CLOSE = 1e-5
SIZES = dict(vocab_size=11, size=32, depth=2, heads=2)
DIT = SIZES | networks.DIT | dict(condition=16)
MD4 = SIZES | networks.MD4 | dict(condition=16, hidden=96)
# name: (options, converter)
NETWORKS = {
    "md4_text": (MD4, published.from_md4),
    "md4_text_outside_embed": (dict(MD4, embedding=16), published.from_md4),
    "md4_text_time_free": (
        dict(SIZES, hidden=96, **networks.MD4_TIME_FREE), published.from_md4,
    ),
    "sedd_absorb": (DIT, published.from_dit),
    "sedd_uniform": (DIT, published.from_dit),
    "radd": (dict(SIZES, **networks.RADD), published.from_dit),
    "mdlm": (DIT, published.from_dit),
    "duo": (dict(DIT, vocab_size=12), published.from_dit),
    "bd3lm": (DIT, published.from_dit),
    "llada": (
        dict(SIZES, vocab_size=125, heads=4, hidden=48, **networks.LLADA), published.from_llada,
    ),
}  # fmt: skip


def peer(name: str) -> tuple[dict, dict]:
    """Returns the answers and the arrays of one instance."""
    return json.loads((PEERS / f"{name}.json").read_text()), safetensors.load_file(
        PEERS / f"{name}.safetensors"
    )


def ours(name: str, t, *, scan: bool = True, clean=None) -> np.ndarray:
    """Returns the logits of our network with their parameters at their z."""
    answers, arrays = peer(name)
    choices, convert = NETWORKS[name]
    options = Transformer(**choices, scan_blocks=scan)
    params = convert(arrays, options)
    network = options.build()
    expected = jax.eval_shape(network.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, expected)
    denoiser = network.bind(params)
    z = jnp.asarray(answers["z"])
    t = jnp.zeros(len(z)) if t is None else jnp.asarray(t, jnp.float32)
    if clean is None:
        return np.asarray(denoiser(z, t))
    times = jnp.repeat(t[:, None], z.shape[1] // 4, axis=1)
    h = denoiser.blocks.features(z, times, jnp.asarray(clean), 4, t[:, None])
    return np.asarray(denoiser.unembed(h))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", [name for name in NETWORKS if name.startswith("md4")])
def test_the_reference(name, scan):
    answers, _ = peer(name)
    found = ours(name, answers["t"], scan=scan)
    np.testing.assert_allclose(found, np.asarray(answers["outputs"]), atol=CLOSE, rtol=0)


def close(found, expected) -> None:
    np.testing.assert_allclose(found, np.asarray(expected), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("fed, outputs", [(None, "outputs"), (0.0, "outputs_sigma_zero")])
@pytest.mark.parametrize("name", ["mdlm", "duo", "bd3lm"])
def test_the_dit_of_mdlm_and_its_successors(name, fed, outputs):
    """Their column of the mask is no symbol, and MDLM and BD3-LM set it to -inf."""
    answers, _ = peer(name)
    sigma = answers["sigma"] if fed is None else np.full(len(answers["z"]), fed)
    found = ours(name, sigma, clean=answers["clean"] if name == "bd3lm" else None)
    close(found, np.asarray(answers[outputs])[..., : found.shape[-1]])


def test_radd_without_time():
    answers, _ = peer("radd")
    found = ours("radd", None)
    close(found, np.asarray(answers["logits"])[..., :11])
    close(jax.nn.log_softmax(found), np.asarray(answers["outputs"])[..., :11])


def test_sedd_with_masks_scales_its_outputs():
    """log s = outputs + log k - log V where z is the mask, k = 1 / (exp(sigma) - 1)."""
    answers, _ = peer("sedd_absorb")
    z, sigma = np.asarray(answers["z"]), np.asarray(answers["sigma"])
    log_score = ours("sedd_absorb", sigma) - np.log(np.expm1(sigma) * 11)[:, None, None]
    expected = np.asarray(answers["outputs"])
    close(log_score[z == 11], expected[z == 11][:, :11])


def test_sedd_with_uniform_noise_gives_log_scores():
    """Those of the process `uniform` with parametrisation score: 0 at z itself."""
    answers, _ = peer("sedd_uniform")
    z, sigma = jnp.asarray(answers["z"]), jnp.asarray(answers["sigma"])
    process = Uniform(11, LogLinear(), "score")
    close(process.log_score(ours("sedd_uniform", sigma), z, sigma), answers["outputs"])


def test_llada():
    close(ours("llada", None), np.asarray(peer("llada")[0]["outputs"])[..., :125])
