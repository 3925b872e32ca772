"""DiffusionGemma: the logits of transformers, what a token sees, and how canvases are filled."""

import json

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import answers, peer_folder, trained_on
from safetensors.numpy import load_file, save_file
from tiny_networks import built, logits

import md4_jax
from md4_jax.networks.diffusion_gemma import DiffusionGemma
from md4_jax.objectives.cross_entropy import CrossEntropy, conditioned
from md4_jax.objectives.head import Logits
from md4_jax.objectives.left_to_right import next_token_nats
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Conditioned, UserError, batch_of

CLOSE = 3e-4  # logits of up to 30 after four layers; those of two runs here differ by 1e-4
CANVAS, SYMBOLS = 4, 124


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return peer_folder(tmp_path_factory.mktemp("diffusiongemma"), "diffusiongemma")


@pytest.fixture(scope="module")
def model(folder):
    return md4_jax.load(folder)


@pytest.fixture(scope="module")
def denoiser(model):
    return model.experiment.network.denoiser(model.params)


def theirs(*names: str) -> list[np.ndarray]:
    told = answers("diffusiongemma")
    return [np.asarray(told[name]) for name in names]


def test_the_config_is_that_of_the_folder(model):
    assert model.domain.vocab_size == SYMBOLS
    network, objective = model.config["network"], model.config["objective"]
    assert (network["window"], network["global_every"], network["global_head_dim"]) == (6, 2, 16)
    assert (network["rotary_part"], network["rotary_base"]) == (0.25, 1e6)
    assert objective == {"name": "cross_entropy", "block": CANVAS}
    assert model.config["process"]["parametrisation"] == "mixture"
    assert model.config["sample"]["name"] == "entropy_bound"


@pytest.mark.slow
def test_the_logits_of_canvases_are_those_of_transformers(denoiser):
    text, noisy, plain = theirs("text", "noisy", "plain")
    h = denoiser.blocks.features(noisy, None, text, CANVAS)
    np.testing.assert_allclose(denoiser.unembed(h)[:, CANVAS:], plain, atol=CLOSE)


def test_the_logits_after_a_prediction_are_those_of_transformers(denoiser):
    text, noisy, plain, conditioned = theirs("text", "noisy", "plain", "conditioned")
    before = np.pad(plain / answers("diffusiongemma")["scale"], ((0, 0), (CANVAS, 0), (0, 0)))
    z = Conditioned(noisy, denoiser.recall(jnp.asarray(before)))
    h = denoiser.blocks.features(z, None, text, CANVAS)
    np.testing.assert_allclose(denoiser.unembed(h)[:, CANVAS:], conditioned, atol=CLOSE)
    unsaid = Conditioned(noisy, jnp.zeros_like(z.signal))
    none = denoiser.blocks.features(unsaid, None, text, CANVAS)
    np.testing.assert_allclose(denoiser.unembed(none)[:, CANVAS:], plain, atol=CLOSE)


def test_the_encoder_predicts_the_next_token_as_that_of_transformers(denoiser):
    text, encoder = theirs("text", "encoder")
    np.testing.assert_allclose(
        denoiser.unembed(denoiser.blocks.reading(text, None)), encoder, atol=CLOSE
    )
    logs = jax.nn.log_softmax(encoder[:, :-1])
    each = -np.take_along_axis(np.asarray(logs), text[:, 1:, None], axis=-1)[..., 0]
    counts = np.ones(text.shape, bool)
    counts[:, :3] = False
    batch = batch_of(text, loss_mask=counts)
    found = next_token_nats(denoiser, batch)
    np.testing.assert_allclose(found, each[:, 2:].sum(axis=1), rtol=1e-5)


@pytest.mark.campaign
def test_the_next_token_of_another_document_is_not_predicted(model):
    text = theirs("text")[0]
    segments = np.asarray([[0] * 8 + [1] * 8] * 2)
    batch = batch_of(text, context={"segments": segments})
    network = model.experiment.network
    found = next_token_nats(network.denoiser(model.params, batch.context), batch)
    alone = network.denoiser(model.params)
    parts = [next_token_nats(alone, batch_of(part)) for part in (text[:, :8], text[:, 8:])]
    np.testing.assert_allclose(found, sum(parts), rtol=1e-4)


@pytest.mark.slow
def test_the_loss_is_that_of_each_canvas_after_the_prompt(denoiser):
    """Eight tokens count after seven: two canvases, with the prompt and earlier ones clean."""
    text = theirs("text")[0]
    counts = (np.arange(16) >= 7) & (np.arange(16) < 15)
    batch = batch_of(text, loss_mask=np.broadcast_to(counts, text.shape))
    process = Uniform(SYMBOLS, parametrisation="mixture")
    objective = Recording(block=CANVAS)
    nats, _, z, t = objective.noting(denoiser, process, batch)
    assert (z[:, :7] == text[:, :7]).all() and t.shape == (2, 4)
    assert sorted(np.round((t[0] - 0.3) * 4 % 4, 4)) == [0, 1, 2, 3]
    # The times of three canvases, in order: nearly all tokens of the noisiest are others.
    changed = (z != text)[:, 7:]
    shares = np.stack([changed[:, part : part + CANVAS].mean(axis=1) for part in (0, 4)], axis=1)
    assert (shares[t[:, :2] > 0.8] > 0.4).all() and (shares[t[:, :2] < 0.1] < 0.6).all()
    expected, zeros = np.zeros(2), jnp.zeros(2)
    read = jax.jit(lambda z, cache: denoiser.blocks.read(z, zeros, cache))
    decode = jax.jit(lambda z, cache: denoiser.blocks.append_block(z, zeros, cache)[0])
    for begin in (7, 11):
        cache = denoiser.blocks.beginning(denoiser.blocks.empty_cache(2, 16), jnp.ones(2, int))
        shifted = np.pad(text, ((0, 0), (1, 0)))
        for first in range(0, begin + 1, CANVAS):
            cache = read(shifted[:, first : first + CANVAS], cache)
        h = decode(z[:, begin : begin + CANVAS], cache)
        logs = np.asarray(jax.nn.log_softmax(denoiser.unembed(h)))
        own = text[:, begin : begin + CANVAS, None]
        expected -= np.take_along_axis(logs, own, axis=-1).sum(axis=(1, 2))
    np.testing.assert_allclose(nats, expected, rtol=1e-4)


class Recording(CrossEntropy):
    """The loss, which also tells the noisy texts and times that it is computed at."""

    def noting(self, denoiser, process, batch):
        @jax.jit
        def call(keys):
            seen = []
            object.__setattr__(self, "seen", seen)
            nats, extra = self(denoiser, process, batch, jnp.full(2, 0.3), keys)
            return nats, extra, *seen[0]

        return jax.tree.map(np.asarray, call(exact.keys_for(0, 2)))

    def loss_at(self, denoiser, process, batch, z, t, weight=1.0):
        self.seen.append((z, t))
        return super().loss_at(denoiser, process, batch, z, t, weight)


@pytest.mark.campaign
def test_a_prediction_is_read_with_the_probability_that_is_asked_for(denoiser):
    text, noisy = theirs("text", "noisy")
    batch, t = batch_of(text), jnp.full((2, 4), 0.5)
    first = denoiser.unembed(denoiser.blocks.features(noisy, None, text, CANVAS))
    signal = denoiser.recall(first)
    chosen = jnp.asarray([[True], [False]])
    z = conditioned(denoiser, batch, jnp.asarray(noisy), t, CANVAS, chosen)
    np.testing.assert_allclose(z.signal[0], signal[0], atol=1e-4)
    assert not np.any(z.signal[1]) and np.array_equal(z.tokens, noisy)
    small = Logits(at_once=5 * SYMBOLS, kept=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("md4_jax.objectives.cross_entropy.LOGITS", small)
        parts = conditioned(denoiser, batch, jnp.asarray(noisy), t, CANVAS, chosen)
    np.testing.assert_allclose(parts.signal, z.signal, atol=1e-4)


@pytest.mark.campaign
def test_a_cache_of_a_text_that_begins_later_gives_the_logits_of_transformers(denoiser):
    """A text of 7 tokens fills two blocks of 4 but for the first place."""
    text, noisy, after = theirs("text", "noisy", "after")
    blocks, begin, t = denoiser.blocks, 7, jnp.zeros(2)
    cache = blocks.beginning(blocks.empty_cache(2, 16), jnp.ones(2, jnp.int32))
    shifted = np.pad(text, ((0, 0), (1, 0)))
    for first in range(0, begin + 1, CANVAS):
        cache = blocks.append_block(shifted[:, first : first + CANVAS], t, cache)[1]
    found = []
    for first in (begin, begin + CANVAS):
        canvas = slice(first, first + CANVAS)
        found.append(denoiser.unembed(blocks.append_block(noisy[:, canvas], t, cache)[0]))
        cache = blocks.append_block(text[:, canvas], t, cache)[1]
    np.testing.assert_allclose(np.concatenate(found, axis=1), after, atol=CLOSE)


@pytest.mark.campaign
def test_a_ring_buffer_of_the_window_forgets_nothing_that_is_seen():
    network, params = built(DiffusionGemma, window=4, global_every=3)
    blocks = network.bind(params).blocks
    z, t = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 16))), jnp.zeros(2)
    found = []
    for window in (4, 16):
        cache, out = blocks.empty_cache(2, window), []
        for first in range(0, 16, 4):
            h, cache = blocks.append_block(z[:, first : first + 4], t, cache)
            out.append(h)
        found.append(jnp.concatenate(out, axis=1))
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.campaign
def test_two_documents_do_not_see_each_other(model):
    text, noisy = theirs("text", "noisy")
    segments = jnp.asarray([[0] * 8 + [1] * 8] * 2)
    network = model.experiment.network
    told = network.denoiser(model.params, {"segments": segments})
    alone = network.denoiser(model.params)
    both = told.blocks.features(noisy, None, text, CANVAS)
    second = alone.blocks.features(noisy[:, 8:], None, text[:, 8:], CANVAS)
    np.testing.assert_allclose(both[:, 8:], second, atol=5e-5)
    whole = told.features(noisy, jnp.zeros(2))
    part = alone.features(noisy[:, 8:], jnp.zeros(2))
    np.testing.assert_allclose(whole[:, 8:], part, atol=5e-5)


def test_it_is_never_told_the_time():
    network, params = built(DiffusionGemma)
    assert network.time_free
    found = [logits(network, params, t=jnp.full(3, t)) for t in (0.1, 0.9)]
    np.testing.assert_array_equal(*found)


def test_factors_of_layers_are_never_trained():
    network, params = built(DiffusionGemma, experts=0)
    z = jnp.asarray([[0, 3, 1, 2]])

    def loss(params):
        return jnp.sum(network.bind(params).blocks.features(z, None, z, 2) ** 2)

    slope = jax.jit(jax.grad(loss))(params)
    for name in ("encoder_scales", "decoder_scales"):
        assert not np.any(slope[name]), name
    assert all(np.any(x) for x in jax.tree.leaves(slope["blocks_1"]["attention"]))


def held_by(folder) -> dict[str, np.ndarray]:
    found = load_file(folder / "model.safetensors")
    return {name: x for name, x in found.items() if "vision" not in name}


def test_it_goes_back_as_it_came_without_the_part_that_reads_images(model, folder, tmp_path):
    exported = model.export(tmp_path / "exported")
    told = [json.loads((f / "config.json").read_text()) for f in (folder, exported)]
    assert told[0] == told[1]
    before, after = held_by(folder), load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.campaign
def test_arrays_under_the_names_of_the_encoder_are_the_same(folder, tmp_path):
    """A checkpoint may hold the layers twice, and the head apart; or under these names alone."""
    held = load_file(folder / "model.safetensors")
    trunk, other = "model.decoder.", "model.encoder.language_model."
    shared = {n: x for n, x in held.items() if n.startswith(trunk) and "self_cond" not in n}
    shared = {n: x for n, x in shared.items() if "layer_scalar" not in n}
    copies = {n.replace(trunk, other, 1): x for n, x in shared.items()}
    copies["lm_head.weight"] = held["model.decoder.embed_tokens.weight"]
    twice, alone = (peer_folder(tmp_path / name, "diffusiongemma") for name in ("twice", "alone"))
    save_file(held | copies, twice / "model.safetensors")
    rest = {name: x for name, x in held.items() if name not in shared}
    save_file(rest | copies, alone / "model.safetensors")
    text, noisy, plain = theirs("text", "noisy", "plain")
    for place in (twice, alone):
        model = md4_jax.load(place)
        blocks = model.experiment.network.denoiser(model.params)
        h = blocks.blocks.features(noisy, None, text, CANVAS)
        np.testing.assert_allclose(blocks.unembed(h)[:, CANVAS:], plain, atol=CLOSE)
        after = load_file(
            model.export(tmp_path / f"back_{place.parent.name}") / "model.safetensors"
        )
        assert after.keys() == held_by(place).keys()
        assert all(np.array_equal(after[name], x) for name, x in held_by(place).items())
    moved = md4_jax.load(twice)
    moved.params = jax.tree.map(lambda x: 1.5 * x, moved.params)
    after = load_file(moved.export(tmp_path / "moved") / "model.safetensors")
    for name, x in copies.items():
        np.testing.assert_allclose(after[name], 1.5 * x, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"hidden_activation": "silu"}, "hidden_activation='silu'; only 'gelu_pytorch_tanh' is"),
        ({"attention_bias": True}, "text_config.attention_bias=True; only False is supported"),
        ({"num_experts": 8}, "says num_experts=8, but its arrays have 4"),
        ({"num_attention_heads": 8}, "says num_attention_heads=8, but its arrays have 4"),
        ({"layer_types": ["full_attention"] * 4}, "Only models in which every n-th"),
        ({"top_k_experts": None}, "config.json lacks top_k_experts"),
        ({"final_logit_softcapping": None}, "says text_config.final_logit_softcapping=null"),
        ({"sliding_window": None}, "says text_config.sliding_window=null"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "yarn"}}},
            "rope_parameters.full_attention=.*yarn.*, which is not supported",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            "rope_parameters.sliding_attention=.*, which is not supported",
        ),
    ],
)
def test_what_is_not_known_is_refused(changes, said, tmp_path):
    text = answers("diffusiongemma")["config"]["text_config"] | changes
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "diffusiongemma", text_config=text))


@pytest.mark.campaign
def test_a_text_begins_anywhere_and_blocks_where_the_prompt_ends(model):
    """Nine tokens after seven are three canvases of six steps, the last of them cut."""
    options = dict(num=2, steps=6, length=16, confidence_threshold=0.0)
    found = model.sample(prompt="abcdefg", **options)
    assert [text[:7] for text in found.texts] == ["abcdefg"] * 2
    np.testing.assert_array_equal(found.evaluations, 18)
    np.testing.assert_array_equal(model.sample(**options).evaluations, 24)
    again = model.sample(prompt="abcdefg", cached=False, **options)
    np.testing.assert_array_equal(again.tokens, found.tokens)


LEARNT = {"objective.self_conditioning": 0.5, "objective.left_to_right": 1.0}


@pytest.mark.campaign
@pytest.mark.parametrize("more", [{}, pytest.param(LEARNT, marks=pytest.mark.campaign)])
def test_a_run_goes_on_with_it(more, folder, tmp_path):
    """Its adapters alone are trained."""
    keys = {
        "network.lora_rank": 2, "data.length": 8, "optim.learning_rate": 0.01, **more,
    }  # fmt: skip
    run = trained_on(folder, tmp_path, keys)
    before, after = md4_jax.load(folder), md4_jax.load(run)
    same = jax.tree.map(np.array_equal, before.params["network"], without(after.params["network"]))
    assert all(jax.tree.leaves(same))
    text, noisy = theirs("text", "noisy")
    found = [
        m.experiment.network.denoiser(m.params).blocks.features(noisy, None, text, CANVAS)
        for m in (before, after)
    ]
    assert np.abs(found[0] - found[1]).max() > 1e-3
    assert np.isfinite(after.score("abcdefgh", draws=1).nats).all()


def without(params: dict) -> dict:
    """Parameters without adapters."""
    return {
        name: without(x) if isinstance(x, dict) else x
        for name, x in params.items()
        if not name.startswith("lora")
    }


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(kv_heads=3), "network.kv_heads=3 must divide network.heads=2"),
        (dict(head_dim=7), "network.head_dim=7 must be even"),
        (dict(cap=0.0), "network.cap=0.0 must be above 0"),
        (dict(experts=2, experts_per_token=3), "experts_per_token=3 must be at most network.exp"),
        (dict(global_every=0), "network.global_every must be at least 1, not 0"),
        (dict(rotary_part=0.0), r"network.rotary_part must lie in \(0, 1\], not 0.0"),
    ],
)
def test_options_that_no_network_has(keys, said):
    with pytest.raises(UserError, match=said):
        DiffusionGemma(5, **(dict(size=16, heads=2, kv_heads=1, global_kv_heads=1) | keys))
