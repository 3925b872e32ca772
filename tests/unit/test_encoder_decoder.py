"""E2D2: an encoder of clean blocks and a decoder of noisy ones, against its own code and itself."""

import functools
import itertools
import json
import types

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noisy_blocks import ADAPTED, in_blocks, of_blocks
from noisy_blocks import drawn as drawn_by
from peer_folders import answers, peer_folder
from safetensors.numpy import load_file, save_file
from tiny_networks import built

import md4_jax
from md4_jax.config import build, schema
from md4_jax.networks.encoder_decoder import EncoderDecoder
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Prompt, UserError, batch_of
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.samplers import given_blocks
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.grids import uniform

NAMES, SYMBOLS, BLOCK = ("e2d2", "e2d2_shared"), 123, 4
CLOSE = 3e-5  # of logits up to 6
# Ways in which a decoder can be made, each with one of the two ways to store blocks.
WAYS = [
    dict(decoder_reads=reads, shared_blocks=shared, scan_blocks=shared)
    for reads, shared in itertools.product(("features", "keys_values"), (False, True))
]
ROWS, LENGTH = 2, 12
CLEAN = np.random.default_rng(1).integers(0, 5, (ROWS, LENGTH))
NOISY = np.where(np.random.default_rng(2).random((ROWS, LENGTH)) < 0.6, 5, CLEAN)
TIMES = jnp.zeros((ROWS, LENGTH // BLOCK))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("e2d2")
    return {name: md4_jax.load(peer_folder(directory, name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_of_blocks_are_those_of_its_own_code(name, models):
    model, told = models[name], answers(name)
    assert model.domain.vocab_size == SYMBOLS == model.experiment.process.mask_id
    found = of_blocks(model, told["z"], told["x"])
    np.testing.assert_allclose(found, np.asarray(told["outputs"])[..., :SYMBOLS], atol=CLOSE)
    network, shared = model.config["network"], name == "e2d2_shared"
    assert (network["shared_blocks"], network["decoder_depth"]) == (shared, 2)
    assert network["decoder_reads"] == ("keys_values" if shared else "features")
    assert model.config["objective"] == {"name": "block", "block": BLOCK}
    assert model.length == 16


def test_logits_of_a_text_without_its_encoder_are_refused(models):
    """Those of the first block need none."""
    model, told = models["e2d2"], answers("e2d2")
    z = np.asarray(told["z"])
    np.testing.assert_allclose(
        model.logits(z[:, :BLOCK]), of_blocks(model, z, told["x"])[:, :BLOCK], atol=CLOSE
    )
    with pytest.raises(UserError, match="give at most one block of 4 tokens, not 5"):
        model.logits(z[:, : BLOCK + 1])


@pytest.mark.parametrize("objective, key", [
    (BlockDiffusion(BLOCK, "times"), "nlls"),
    (BlockDiffusion(BLOCK, weights="equal"), "train_nats"),
])  # fmt: skip
def test_bound_and_loss_are_those_of_its_own_code(objective, key, models):
    """Its evaluation weighs a block by 1 / t, its training by 1."""
    model, told = models["e2d2"], answers("e2d2")
    denoiser = model.experiment.network.denoiser(model.params)
    x, z, t = (jnp.asarray(told[name]) for name in "xzt")
    found = objective.loss_at(denoiser, model.experiment.process, batch_of(x), z, t)
    np.testing.assert_allclose(found, told[key], rtol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.cases(1)
def test_the_tokens_that_its_sampler_draws(name, models):
    """With its cache: the surest token of each step, one encoder call for each block."""
    told = answers(name)
    found, passes = drawn_by(models[name], told["x"][0][:4], 16, name="confidence", steps=4)
    assert (found, passes) == (told["samples"], told["passes"])


@pytest.mark.parametrize("name", NAMES)
def test_a_published_folder_is_written_again(name, models, tmp_path):
    """Also with the copies that its own code stores, and with blocks of another size."""
    source = peer_folder(tmp_path / "with_copies", name)
    arrays = load_file(source / "model.safetensors")
    table = "backbone.encoder.model.embed_tokens.weight"
    copies = {f"backbone.{part}.lm_head.weight": table for part in ("encoder", "decoder")}
    if name == "e2d2_shared":
        copies |= {x.replace("encoder", "decoder"): x for x in arrays}
    full = arrays | {ours: arrays[theirs] for ours, theirs in copies.items()}
    save_file(full, source / "model.safetensors")
    model = md4_jax.load(source, config={"objective.block": 8})
    folder = model.export(tmp_path / "exported")
    told = json.loads((folder / "config.json").read_text())
    assert (told["block_size"], told["eval_block_size"], told["model_type"]) == (8, 8, "e2d2")
    written = load_file(folder / "model.safetensors")
    assert written.keys() == full.keys()
    for key, value in full.items():
        np.testing.assert_array_equal(written[key][:124], value[:124], err_msg=key)


@pytest.mark.parametrize("changes, said", [
    (dict(use_encoder_causal_mask=True), "only encoders that attend to whole blocks"),
    (dict(_target_="backbone_automodel.AutoModelFromPreTrained"), "_target_=.* is not supported"),
    (dict(keep_top_encoder_layers=True), "if its layers read the last layers of the encoder"),
    (dict(tie_encoder_decoder_weights=False), "num_encoder_layers=3, num_decoder_layers=2"),
])  # fmt: skip
def test_forms_of_its_code_that_are_not_known_are_refused(changes, said, tmp_path):
    backbone = answers("e2d2_shared")["config"]["backbone_config"] | changes
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "e2d2_shared", backbone_config=backbone))


@functools.cache
def made(**options):
    network, params = built(EncoderDecoder, depth=3, **options)
    return network.bind(params)


def in_one_pass(denoiser, z=NOISY, clean=CLEAN) -> np.ndarray:
    return np.asarray(denoiser.blocks.features(jnp.asarray(z), TIMES, jnp.asarray(clean), BLOCK))


def options_of(way: dict) -> dict:
    return way | dict(decoder_depth=2, kv_heads=1, qk_norm=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.cases(1)
def test_block_after_block_gives_what_one_pass_gives(way):
    """The encoder reads each clean block once, and the decoder reads the cache."""
    denoiser, found, zeros = made(**options_of(way)), [], jnp.zeros(ROWS)
    cache = denoiser.blocks.empty_cache(ROWS, LENGTH)
    for begin in range(0, LENGTH, BLOCK):
        part = slice(begin, begin + BLOCK)
        h, _ = denoiser.blocks.append_block(jnp.asarray(NOISY)[:, part], zeros, cache)
        cache = denoiser.blocks.read(jnp.asarray(CLEAN)[:, part], zeros, cache)
        found.append(h)
    whole = in_one_pass(denoiser)
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=1e-4)
    alone = denoiser.features(jnp.asarray(NOISY)[:, :BLOCK], zeros)
    np.testing.assert_allclose(alone, whole[:, :BLOCK], atol=1e-4)


@pytest.mark.quick(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.cases(2)
def test_what_each_block_sees(way):
    """A noisy token is seen in its own block alone, a clean one in all blocks after its own."""
    denoiser, places = made(**options_of(way)), np.arange(LENGTH) // BLOCK
    before = in_one_pass(denoiser)
    for position in (1, 6, 11):
        noisy, clean = (np.array(x) for x in (NOISY, CLEAN))
        noisy[:, position] = (NOISY[:, position] + 1) % 6
        clean[:, position] = (CLEAN[:, position] + 1) % 5
        for changed, seen in (
            (in_one_pass(denoiser, z=noisy), places == places[position]),
            (in_one_pass(denoiser, clean=clean), places > places[position]),
        ):
            differs = np.abs(changed - before).max(axis=(0, 2)) > 0
            np.testing.assert_array_equal(differs, seen)


def test_with_all_blocks_shared_it_is_the_network_of_block_diffusion():
    """The decoder's blocks are then those of the encoder, and read its keys and values."""
    form = dict(kv_heads=1, time_conditioning=False)
    network, params = built(Transformer, **form)
    options = dict(decoder_depth=2, decoder_reads="keys_values", shared_blocks=True)
    other, theirs = built(EncoderDecoder, **form, **options)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, theirs)
    found = in_one_pass(other.bind(params))
    np.testing.assert_allclose(found, in_one_pass(network.bind(params)), atol=1e-5)
    # The encoder computes its last layer too, of which Transformer makes keys and values alone.
    last = params["blocks"]["attention"]
    spared = 16 * 16 * 2 + 3 * 16 * 24
    assert last["query"]["kernel"].shape[1:] == (16, 16)
    attended = 4 * 16 * (LENGTH + BLOCK) / 2
    flops = [x.flops(params, LENGTH, BLOCK) for x in (other, network)]
    assert flops[0] - flops[1] == 2 * spared + attended


def test_operations_are_counted_by_hand():
    """A layer has 4 x 16 x 16 + 3 x 16 x 24 weights, the head 16 x 128."""
    network, params = built(EncoderDecoder, depth=3, decoder_depth=2)
    layer, head, of_features = 2176, 2048, 2 * 2 * 16 * 16
    attended = 2 * (LENGTH + BLOCK) * 16 * 5
    found = network.flops(params, LENGTH, BLOCK)
    assert found == 2 * (5 * layer + head + of_features) + attended
    assert network.flops(params, LENGTH) == 2 * (2 * layer + head) + 4 * LENGTH * 16 * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.cases(2)
def test_documents_do_not_see_one_another(way):
    """In both halves; a text whose last block is shorter is padded."""
    segments = jnp.asarray([[0] * 5 + [1] * 6, [0] * 8 + [1] * 3])
    network, params = built(EncoderDecoder, depth=3, **options_of(way))
    denoiser = network.bind(params, {"segments": segments})
    short = (x[:, :11] for x in (NOISY, CLEAN))
    whole = in_one_pass(denoiser, *short)
    clean = CLEAN[:, :11].copy()
    clean[0, :5], clean[1, :8] = (clean[0, :5] + 1) % 5, (clean[1, :8] + 2) % 5
    changed = in_one_pass(denoiser, NOISY[:, :11], clean)
    np.testing.assert_array_equal(changed[0, 5:], whole[0, 5:])
    np.testing.assert_array_equal(changed[1, 8:], whole[1, 8:])
    assert (changed[0, 4] != whole[0, 4]).any() and whole.shape == (2, 11, 16)


@pytest.mark.quick(1)
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.cases(1)
def test_every_parameter_learns(way, remat):
    """From the initial values, after the zeros of output layers have moved."""
    options = dict(decoder_depth=2, qk_norm=True, initial="torch", dropout=0.1, remat=remat)
    network = EncoderDecoder(5, 16, 3, 2, 24, **options, **way).build()
    params = network.init(jax.random.key(0))
    clean, keys = batch_of(jnp.asarray(CLEAN)), exact.keys_for(0, ROWS)

    @jax.jit
    def slope(params):
        def loss(params):
            denoiser = network.bind(params, {}, keys)
            return jnp.sum(BlockDiffusion(BLOCK)(denoiser, Masking(5), clean, U, keys)[0])

        return jax.grad(loss)(params)

    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, slope(params))
    flat = jax.tree_util.tree_leaves_with_path(slope(moved))
    still = [jax.tree_util.keystr(path) for path, g in flat if not np.abs(g).max()]
    assert all("'blocks'" in name or "blocks_2" in name for name in still)
    if way["decoder_reads"] == "features" or way["shared_blocks"]:
        assert not still


U = jnp.asarray([0.2, 0.7])


@pytest.mark.quick(1)
@pytest.mark.cases(1)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_cache_changes_no_sample(way, cached):
    np.testing.assert_array_equal(samples(way_key(way), cached), samples(way_key(way), True))


def way_key(way: dict) -> tuple:
    return tuple(sorted(options_of(way).items()))


@functools.cache
def samples(way: tuple, cached: bool, prompted: int = 5) -> np.ndarray:
    network, params = built(EncoderDecoder, depth=3, **dict(way))
    given = np.zeros((ROWS, LENGTH), bool)
    given[:, :prompted] = True
    sampler = Blocks(BLOCK, 8, cached=cached)  # a window of two blocks

    @jax.jit
    def run(params):
        return sampler(
            network.bind(params), Masking(5), Ancestral(), grid=uniform(3),
            keys=exact.keys_for(1, ROWS), prompt=Prompt(jnp.asarray(CLEAN), given),
        )[0].z  # fmt: skip

    found = np.asarray(run(params))
    assert (found[given] == CLEAN[given]).all() and (found < 5).all()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("given", "window", "read"),
    [((12, 12), 12, 6), ((9, 12), 12, 4), ((12, 3), 12, 0), ((12, 12), 6, 2), ((12, 12), 2, 0)],
)
def test_a_prompt_is_read_in_few_passes(given, window, read, way, monkeypatch):
    """Two blocks of two tokens in a pass, where all texts have them: the cache of one by one."""
    monkeypatch.setattr(given_blocks, "AT_ONCE", 4)
    denoiser, zeros = made(**options_of(way)), jnp.zeros(ROWS)
    mask = np.arange(LENGTH) < np.array(given)[:, None]
    prompt, sampler = Prompt(jnp.asarray(CLEAN), mask), Blocks(2, window)
    text = sampler.begun(denoiser, Masking(5), prompt, None)
    found = given_blocks.read_prompt(denoiser.blocks, text, prompt, block=2, window=window)
    cache = text.cache
    for begin in range(0, 2 * read, 2):
        cache = denoiser.blocks.read(jnp.asarray(CLEAN)[:, begin : begin + 2], zeros, cache)
    assert int(found.b) == read and int(found.cache.count) == 2 * read
    for one, other in zip(found.cache[:2], cache[:2], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.campaign
def test_prompts_read_in_few_passes_give_the_same_samples(monkeypatch):
    found = samples(way_key(WAYS[0]), True, 9)
    monkeypatch.setattr(given_blocks, "AT_ONCE", 0)
    np.testing.assert_array_equal(samples.__wrapped__(way_key(WAYS[0]), True, 9), found)


def test_equal_weights_are_the_mean_over_numbers_of_masks():
    """By enumeration: 1 to `block` masks are equally likely, and so are their places."""
    nats = np.random.default_rng(3).gamma(2.0, size=(3, 2, 2, 2))  # symbol, then what is masked
    block, wanted = 3, 0.0
    table = jnp.asarray(-nats.astype(np.float32))
    for count in range(1, block + 1):
        sets = list(itertools.combinations(range(block), count))
        for chosen in sets:
            hidden = tuple(int(n in chosen) for n in range(block))
            wanted += sum(nats[n][hidden] for n in chosen) / (len(sets) * block)

    def features(z, t):
        hidden = (z == 2).astype(jnp.int32)
        log_p = table[:, hidden[:, 0], hidden[:, 1], hidden[:, 2]].T
        return jnp.stack([log_p, jnp.log1p(-jnp.exp(jnp.minimum(log_p, -1e-6)))], axis=-1)

    denoiser = in_blocks(lambda before: Denoiser(features, lambda h: h))
    count = 1 << 14
    batch = batch_of(jnp.zeros((count, block), jnp.int32))
    u = jnp.asarray((np.arange(count) + 0.5) / count, jnp.float32)
    objective = BlockDiffusion(block, weights="equal")
    found = np.asarray(objective(denoiser, Masking(2), batch, u, exact.keys_for(4, count))[0])
    assert abs(found.mean() - wanted) < 4.5 * found.std() / count**0.5
    assert not objective.is_bound(Masking(2)) and not objective.is_exact(None)
    assert objective.for_evaluation() == BlockDiffusion(block)


@pytest.mark.slow
def test_a_qwen_becomes_one(tmp_path):
    """Its blocks are the encoder's, and the last of them the decoder's too."""
    source = peer_folder(tmp_path, "qwen3")
    changes = dict(ADAPTED) | {"objective.block": BLOCK, "network.name": "encoder_decoder"}
    changes |= {"network.decoder_reads": "keys_values", "network.shared_blocks": True}
    depth = md4_jax.load(source).config["network"]["depth"]
    other = md4_jax.load(source, config=ADAPTED | {"objective.block": BLOCK})
    rng = np.random.default_rng(5)
    clean = rng.integers(0, 100, (2, 8))
    z = np.where(rng.random(clean.shape) < 0.5, other.experiment.process.mask_id, clean)
    whole = md4_jax.load(source, config=changes | {"network.decoder_depth": depth})
    np.testing.assert_allclose(of_blocks(whole, z, clean), of_blocks(other, z, clean), atol=CLOSE)
    light = md4_jax.load(source, config=changes | {"network.decoder_depth": 1})
    assert np.abs(of_blocks(light, z, clean) - of_blocks(other, z, clean)).max() > 0.1
    with pytest.raises(UserError, match="has no array for the parameter decoder_blocks"):
        md4_jax.load(source, config=changes | {"network.shared_blocks": False})


def experiment(**changes):
    words = {key.replace("__", "."): str(value) for key, value in changes.items()}
    found = schema.load_config(str(PACKAGE_ROOT / "configs" / "e2d2_owt.py"), words)
    return build.experiment(found, types.SimpleNamespace(**ANY))


ANY = {"vocab_size": 5, "eot_id": 0, "unit": "character", "shape": (1024,)}


def test_the_published_recipe_trains_with_equal_weights_and_reports_the_bound():
    own = experiment()
    assert own.objective == BlockDiffusion(4, weights="equal")
    assert own.evals["test"].objective == BlockDiffusion(4)


@pytest.mark.parametrize("changes, said", [
    (dict(objective={"name": "md4"}), "clean blocks before a noisy one: take objective.name="),
    (dict(objective={"name": "preference"}, objective__block=0), "set objective.block above 0"),
    (dict(network__causal=True), "needs network.causal=False, not True"),
    (dict(network__time_conditioning=True), "needs network.time_conditioning=False"),
    (dict(network__decoder_reads="all"), "network.decoder_reads must be features or keys_values"),
    (dict(network__decoder_depth=0), "network.decoder_depth must be at least 1"),
    (
        dict(network__shared_blocks=True, network__decoder_depth=11),
        "network.decoder_depth=11 must be at most network.depth=10",
    ),
    (dict(objective__weights="half"), "objective.weights must be 'bound' or 'equal', not 'half'"),
    (dict(objective__draws="times"), "objective.weights='equal' needs objective.draws='exact'"),
    (dict(sample__dual_cache=True), "its encoder does not read the tokens after a block"),
])  # fmt: skip
def test_wrong_options(changes, said):
    named = changes.pop("objective", {}).get("name")
    changes = {"objective__name": named, **changes} if named else changes
    with pytest.raises(UserError, match=said):
        experiment(**changes)
