"""Networks of other projects: with their parameters ours returns their outputs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import networks
from md4_jax.networks import published, published_images
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.unet import UNet
from md4_jax.networks.uvit import UViT
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Geometric, Linear, LogLinear
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, batch_of

INSTANCES = Path(__file__).parents[1] / "published"
CLOSE = 1e-5
SIZES = dict(vocab_size=11, size=32, depth=2, heads=2)
DIT = SIZES | networks.DIT | dict(condition=16)
REFERENCE = SIZES | networks.MD4 | dict(condition=16, hidden=96)
DREAM = SIZES | networks.LLADA | dict(
    vocab_size=123, heads=4, kv_heads=2, hidden=48, rotary_base=1e6, norm_eps=1e-6
)  # fmt: skip
# name: (options, converter)
NETWORKS = {
    "md4_text": (REFERENCE, published.from_md4),
    "md4_text_outside_embed": (dict(REFERENCE, embedding=16), published.from_md4),
    "md4_text_time_free": (
        dict(SIZES, hidden=96, **networks.MD4_TIME_FREE), published.from_md4,
    ),
    "sedd_absorb": (DIT, published.from_dit),
    "sedd_uniform": (DIT, published.from_dit),
    "radd": (dict(SIZES, **networks.RADD), published.from_dit),
    "mdlm": (DIT, published.from_dit),
    "duo": (dict(DIT, vocab_size=12), published.from_dit),
    "udlm": (dict(DIT, vocab_size=12), published.from_dit),
    "bd3lm": (DIT, published.from_dit),
    "gidd": (DIT, published.from_dit),
    "llada": (
        dict(SIZES, vocab_size=125, heads=4, hidden=48, **networks.LLADA), published.from_llada,
    ),
    "dream": (dict(DREAM, qkv_bias=True, shifted=True), published.from_llama),
}  # fmt: skip


def peer(name: str) -> tuple[dict, dict]:
    """Returns the answers and the arrays of one instance."""
    answers = json.loads((INSTANCES / f"{name}.json").read_text())
    return answers, load_file(INSTANCES / f"{name}.safetensors")


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


# Too large to be carried with the tests.
LARGE = Path(__file__).parents[3] / "shared" / "peers"
IMAGES = dict(vocab_size=11, shape=(8, 8, 3), channels=32)
OF_IMAGES = {
    "md4_unet": (UNet, dict(blocks=2), published_images.from_md4_unet),
    "md4_uvit": (
        UViT, dict(blocks=1, size=32, depth=2, heads=2), published_images.from_md4_uvit
    ),
}  # fmt: skip


@pytest.mark.skipif(not LARGE.exists(), reason="needs ../shared, with the instances of images")
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_the_reference_on_images(name, scan):
    make, sizes, convert = OF_IMAGES[name]
    answers = json.loads((LARGE / f"{name}.json").read_text())
    options = make(**IMAGES, **sizes, scan_blocks=scan)
    params = convert(load_file(LARGE / f"{name}.safetensors"), options)
    network = options.build()
    expected = jax.eval_shape(network.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, expected)
    z, t = np.asarray(answers["z"]), jnp.asarray(answers["t"], jnp.float32)
    found = jax.jit(lambda p, z, t: network.bind(p)(z, t))(params, z.reshape(len(z), -1), t)
    wanted = np.asarray(answers["outputs"], np.float32).reshape(found.shape)
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


def close(found, expected) -> None:
    np.testing.assert_allclose(found, np.asarray(expected), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("fed, outputs", [(None, "outputs"), (0.0, "outputs_sigma_zero")])
@pytest.mark.parametrize("name", ["mdlm", "duo", "udlm", "bd3lm"])
def test_the_dit_of_mdlm_and_its_successors(name, fed, outputs):
    """Their column of the mask is no symbol, and MDLM and BD3-LM set it to -inf."""
    answers, _ = peer(name)
    sigma = answers["sigma"] if fed is None else np.full(len(answers["z"]), fed)
    found = ours(name, sigma, clean=answers["clean"] if name == "bd3lm" else None)
    close(found, np.asarray(answers[outputs])[..., : found.shape[-1]])


def test_gidd_is_told_t():
    """Their column of the mask is set to -inf by their loss and sampler."""
    answers, _ = peer("gidd")
    close(ours("gidd", answers["t"]), np.asarray(answers["outputs"])[..., :11])


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


@pytest.mark.parametrize("scan", [True, False])
def test_dream(scan):
    """Groups of queries share a key, which has a bias; logits are those of the position before."""
    close(ours("dream", None, scan=scan), np.asarray(peer("dream")[0]["outputs"])[..., :123])


def test_llada():
    close(ours("llada", None), np.asarray(peer("llada")[0]["outputs"])[..., :125])


def denoiser_of(logits) -> Denoiser:
    """Returns the denoiser that gives these logits at whatever it is asked."""
    return Denoiser(lambda z, t: jnp.asarray(logits, jnp.float32), lambda h: h)


def cross_entropies(logits: np.ndarray, z: np.ndarray, x: np.ndarray, mask: int) -> np.ndarray:
    """Sum over masked positions of -log mu(x), in float64: [B]."""
    top = logits.max(axis=-1, keepdims=True)
    log_mu = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    each = -np.take_along_axis(log_mu, x[..., None], axis=-1)[..., 0]
    return np.where(z == mask, each, 0.0).sum(axis=1)


def clean_of(answers: dict, mask: int) -> np.ndarray:
    """Returns the clean tokens; where the instance has none, symbols in turn under the masks."""
    z = np.asarray(answers["z"])
    symbols = np.broadcast_to(np.arange(z.shape[1]) % mask, z.shape)
    return np.asarray(answers.get("clean", np.where(z == mask, symbols, z)))


@pytest.mark.parametrize(
    "name", ["md4_text", "md4_text_outside_embed", "md4_text_time_free", "radd", "mdlm", "llada"]
)
def test_the_loss_of_their_logits_is_that_of_md4(name):
    """-alpha' / (1 - alpha) times the cross-entropy at masks (A4), which is 1 / t of each."""
    answers, _ = peer(name)
    symbols = NETWORKS[name][0]["vocab_size"]
    key = "logits" if name == "radd" else "outputs"
    logits = np.asarray(answers[key], np.float64)[..., :symbols]
    z, x = np.asarray(answers["z"]), clean_of(answers, symbols)
    t = np.asarray(answers.get("t") or [0.2, 0.5, 0.9])
    for schedule in (Linear(), LogLinear(1e-3)):
        process = Masking(symbols, schedule)
        found = MD4().loss_at(
            denoiser_of(logits), process, batch_of(x), jnp.asarray(z), jnp.float32(t)
        )
        expected = cross_entropies(logits, z, x, symbols) / t
        assert (expected > 1).sum() > 1
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_loss_of_sedds_scores_with_masks():
    """A10: sigma times the sum over masks of sum_j s_j - k log s_x + k (log k - 1)."""
    answers, _ = peer("sedd_absorb")
    z, x = np.asarray(answers["z"]), np.asarray(answers["clean"])
    sigma = np.asarray(answers["sigma"], np.float64)
    log_score = np.asarray(answers["outputs"], np.float64)[..., :11]
    k = 1.0 / np.expm1(sigma)[:, None]
    of_x = np.take_along_axis(log_score, x[..., None], axis=-1)[..., 0]
    each = np.exp(log_score).sum(axis=-1) - k * of_x + k * (np.log(k) - 1.0)
    process = Masking(11, LogLinear(1e-3), "sigma")
    t = -np.expm1(-sigma) / (1.0 - 1e-3)
    rate = (1.0 - 1e-3) / (1.0 - (1.0 - 1e-3) * t)
    expected = rate * np.where(z == 11, each, 0.0).sum(axis=1)
    # What the network gives before its outputs are scaled.
    outputs = log_score + np.log(np.expm1(sigma) * 11)[:, None, None]
    found = ScoreEntropy().loss_at(
        denoiser_of(outputs), process, batch_of(x), jnp.asarray(z), jnp.float32(t)
    )
    assert (expected > 1).all()
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_the_loss_of_sedds_scores_with_uniform_noise():
    """A10 and S04, with the probabilities of the noise written out: r_y = q(y | x) / q(z | x)."""
    answers, _ = peer("sedd_uniform")
    z, x = np.asarray(answers["z"]), np.asarray(answers["clean"])
    sigma = np.asarray(answers["sigma"], np.float64)
    log_score = np.asarray(answers["outputs"], np.float64)
    other = -np.expm1(-sigma)[:, None, None] / 11
    law = np.where(np.arange(11) == x[..., None], np.exp(-sigma)[:, None, None] + other, other)
    ratio = law / np.take_along_axis(law, z[..., None], axis=-1)
    each = np.exp(log_score) - ratio * log_score + ratio * (np.log(ratio) - 1.0)
    each = np.where(np.arange(11) == z[..., None], 0.0, each).sum(axis=(1, 2)) / 11
    schedule = Geometric(1e-2, 20.0)
    process = Uniform(11, schedule, "score", "sigma")
    t = np.log(sigma / 1e-2) / np.log(20.0 / 1e-2)
    expected = sigma * np.log(20.0 / 1e-2) * each
    found = ScoreEntropy().loss_at(
        denoiser_of(log_score), process, batch_of(x), jnp.asarray(z), jnp.float32(t)
    )
    assert (expected > 1).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
