"""WeDLM's loss: masked blocks beside the clean text in one pass, and its published numbers."""

import functools
import itertools
import json
import types

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import answers, peer_folder, trained_on
from tiny_networks import perturbed

import md4_jax
from md4_jax.config import build, schema
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.eso import EsoOrders
from md4_jax.objectives.wedlm import WeDLM
from md4_jax.processes.masking import Masking
from md4_jax.protocols import UserError, batch_of
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.samplers.eso import Eso
from md4_jax.samplers.streaming import Streaming

V, L, BLOCK, MASK = 3, 5, 2, 3
X = np.array([2, 0, 1, 1, 2], np.int32)
TINY = Transformer(
    vocab_size=V, size=16, depth=2, heads=2, hidden=24, time_conditioning=False, qk_norm=True
)
PATTERNS = exact.patterns(L)
BLOCKS = [range(begin, min(begin + BLOCK, L)) for begin in range(0, L, BLOCK)]


@functools.cache
def tiny():
    network = TINY.build("cpu")
    return network, perturbed(network.init(jax.random.key(0)))


@pytest.fixture(autouse=True, scope="module")
def made_outside_of_programs():
    tiny()


def denoiser(**context):
    network, params = tiny()
    return network.bind(params, {name: jnp.asarray(x) for name, x in context.items()})


@functools.cache
def single() -> dict[tuple[int, ...], np.ndarray]:
    """log-probabilities [L, V] of a text that is read alone, tokens before masks.

    By the masked positions. No clean text stands beside it, and no mask is seen through.
    """
    z = np.where(PATTERNS, MASK, X)
    order = np.argsort(PATTERNS, axis=1, kind="stable")
    rank = jnp.asarray(np.argsort(order, axis=1))

    @jax.jit
    def read(z):
        own = denoiser()
        return jax.nn.log_softmax(own.unembed(own.ordered.features(z, jnp.zeros(len(z)), rank)))

    found = np.asarray(read(jnp.asarray(z)))
    return {tuple(np.flatnonzero(p)): found[i] for i, p in enumerate(PATTERNS)}


def nats(block, masks) -> float:
    """-log of the masked tokens of a block, in the text that the decoder has then.

    All positions after the block are masks there.
    """
    after = range(block[-1] + 1, L)
    logs = single()[(*masks, *after)]
    return -float(sum(logs[n, X[n]] for n in masks))


def weighed(block, masks) -> float:
    return len(block) / len(masks) * nats(block, masks) if masks else 0.0


@functools.cache
def terms(objective):
    """(x [B, L], z [B, L]) -> nats [B] and the parts of the loss at given masks."""
    return jax.jit(lambda x, z: objective.loss_at(denoiser(), Masking(V), batch_of(x), z))


@pytest.mark.parametrize("weights", ["bound", "equal"])
def test_both_streams_compute_what_the_decoder_sees(weights):
    """All patterns of masks; a short last block, and masks that see those before them."""
    z = jnp.asarray(np.where(PATTERNS, MASK, X))
    found, _ = terms(WeDLM(BLOCK, 0.0, weights))(jnp.asarray(np.tile(X, (len(z), 1))), z)
    cost = weighed if weights == "bound" else nats
    expected = [
        sum(cost(block, [n for n in block if pattern[n]]) for block in BLOCKS)
        for pattern in PATTERNS
    ]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)


def test_the_mean_is_that_of_all_masks():
    """By hand over numbers of masks and their places, and over draws of the objective."""
    expected = 0.0
    for block in BLOCKS:
        for count in range(1, len(block) + 1):
            chosen = list(itertools.combinations(block, count))
            each = [weighed(block, list(masks)) for masks in chosen]
            expected += np.mean(each) / len(block)
    rows = 1 << 12
    u, keys = jnp.asarray((np.arange(rows) + 0.5) / rows, jnp.float32), exact.keys_for(3, rows)
    batch = batch_of(jnp.asarray(np.tile(X, (rows, 1))))
    objective = WeDLM(BLOCK, 0.0)
    found = np.asarray(jax.jit(lambda: objective(denoiser(), Masking(V), batch, u, keys)[0])())
    error = found.std() / np.sqrt(rows)
    assert 0 < error < 0.01 * expected and abs(found.mean() - expected) < 4.5 * error


def test_blocks_of_one_token_are_the_exact_likelihood():
    x = jnp.asarray(exact.sequences(V, 3)[::5])
    arguments = Masking(V), batch_of(x), jnp.zeros(len(x)), exact.keys_for(0, len(x))
    one, order = (
        jax.jit(lambda of=of: of(denoiser(), *arguments)[0])()
        for of in (WeDLM(1, 0.0), EsoOrders(0.0))
    )
    np.testing.assert_allclose(one, order, rtol=1e-5)
    assert WeDLM(1, 0.0).is_exact(None)
    assert not any(of.is_exact(None) for of in (WeDLM(1), WeDLM(2, 0.0), WeDLM(1, 0.0, "equal")))


def test_the_clean_stream_predicts_the_next_token_as_a_causal_network():
    """Whatever the masks; the first token has nothing before it."""
    _, params = tiny()
    causal = Transformer(**{**vars(TINY), "causal": True}).build("cpu").bind(params)
    logs = jax.nn.log_softmax(causal(jnp.asarray(X[None]), jnp.zeros(1)))[0]
    expected = -sum(float(logs[n - 1, X[n]]) for n in range(1, L))
    z = jnp.asarray(np.where(PATTERNS, MASK, X))
    x = jnp.asarray(np.tile(X, (len(z), 1)))
    both, parts = terms(WeDLM(BLOCK, 0.5))(x, z)
    np.testing.assert_allclose(parts["left_to_right"], expected, rtol=2e-5)
    np.testing.assert_allclose(both - terms(WeDLM(BLOCK, 0.0))(x, z)[0], 0.5 * expected, rtol=1e-4)


def test_documents_of_a_row_do_not_see_each_other():
    x, z = np.array([[0, 2, 1, 1, 2, 0, 1, 0]]), np.array([[0, MASK, MASK, MASK, MASK, 0, MASK, 0]])
    objective, parts = WeDLM(BLOCK, 1.0), (slice(0, 4), slice(4, 8))

    def loss(own, x, z):
        batch = batch_of(jnp.asarray(x), context=own)
        run = jax.jit(lambda z: objective.loss_at(denoiser(**own), Masking(V), batch, z)[0])
        return run(jnp.asarray(z))

    together = loss({"segments": np.array([[0, 0, 0, 0, 1, 1, 1, 1]])}, x, z)
    apart = sum(loss({}, x[:, part], z[:, part]) for part in parts)
    np.testing.assert_allclose(together, apart, rtol=2e-5)
    assert abs(float(loss({}, x, z)[0] - apart[0])) > 0.01


def own(entries) -> np.ndarray:
    """Entries of the published vocabulary as symbols here, where the mask is the last."""
    entries = np.asarray(entries)
    return np.where(entries == 121, 123, entries - (entries > 121)).astype(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return md4_jax.load(peer_folder(tmp_path_factory.mktemp("wedlm"), "wedlm"))


def test_published_code_has_the_same_costs(model):
    """Of masks and of next tokens, with prompts that it neither masks nor counts."""
    told = answers("wedlm")["training"]
    x, z, each, following = (np.asarray(told[key]) for key in ("x", "z", "nats", "next_nats"))
    place = np.arange(x.shape[1])
    counts = place >= np.asarray(told["prompt"])[:, None]
    batch = batch_of(jnp.asarray(own(x)))._replace(loss_mask=jnp.asarray(counts))
    network = model.experiment.network.denoiser(model.params)

    block = place // told["block_size"]
    ratios = np.ones(x.shape)
    for row, number in itertools.product(range(len(x)), set(block)):
        here = (block == number) & counts[row]
        if not here.any():
            continue
        masks = (z[row] == 121) & here
        ratios[row, here] = max(masks.sum(), 1) / here.sum()
    expected = {"equal": each.sum(axis=1), "bound": (each / ratios).sum(axis=1)}
    later = np.where(counts, following, 0.0).sum(axis=1)
    for weights, wanted in expected.items():
        objective = WeDLM(told["block_size"], weights=weights)
        run = jax.jit(functools.partial(objective.loss_at, network, model.experiment.process))
        found, parts = run(batch, jnp.asarray(own(z)))
        np.testing.assert_allclose(parts["left_to_right"], later, rtol=2e-5)
        np.testing.assert_allclose(found - later, wanted, rtol=5e-5)


def config(**changes) -> dict:
    words = {"objective.name": "wedlm", "sample.name": "streaming"}
    words |= {"network.time_conditioning": "False"}
    words |= {key.replace("__", "."): str(value) for key, value in changes.items()}
    return schema.load_config(str(PACKAGE_ROOT / "configs" / "base.py"), words)


ANY = types.SimpleNamespace(vocab_size=5, eot_id=None, unit="character", shape=(256,))


def test_evaluators_report_the_likelihood_from_left_to_right():
    """Whatever they name; and the sampler of Eso-LM draws from left to right."""
    experiment = build.experiment(config(), ANY)
    assert experiment.objective == WeDLM(32, 1.0) and experiment.sampler_step == Streaming()
    assert experiment.evals["test"].objective == EsoOrders(0.0)
    for name in ("wedlm", "eso_orders"):
        named = config(evals__test__objective__name=name, sample__name="eso")
        experiment = build.experiment(named, ANY)
        assert experiment.evals["test"].objective == EsoOrders(0.0)
        assert experiment.sampler_step == Eso(0.0)
    process = experiment.process
    assert WeDLM(left_to_right=0.0).is_bound(process) and not WeDLM().is_bound(process)
    assert not WeDLM(left_to_right=0.0, weights="equal").is_bound(process)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(objective__block_size=0), "objective.block_size must be at least 1, not 0"),
        (dict(objective__left_to_right=-1.0), "objective.left_to_right must not be negative"),
        (dict(objective__weights="half"), "objective.weights must be 'bound' or 'equal', not 'ha"),
        (dict(objective__block=4), "block"),
        (dict(network__time_conditioning=True), "needs network.time_conditioning=False, not True"),
        (dict(network__causal=True), "'wedlm' needs network.causal=False"),
        (dict(sample__name="ancestral"), "evaluates the network on whole texts, but objective.n"),
        (dict(sample__block=4), "sample.block=4 cannot be used with sample.name='streaming'"),
    ],
)
def test_what_does_not_go_together(changes, said):
    with pytest.raises(UserError, match=said):
        build.experiment(config(**changes), ANY)


@pytest.mark.slow
def test_a_published_model_is_trained_further_and_exported(tmp_path):
    """From the command line, with the loss of its authors, which is no likelihood."""
    keys = {"data.length": 16, "objective.block_size": 4}
    run = trained_on(peer_folder(tmp_path, "wedlm"), tmp_path, keys)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert "train_loss_bits" in row and not {"train_bits", "bits_per_token"} & row.keys()
    model = md4_jax.load(run)
    assert model.experiment.objective == WeDLM(4)
    exported = md4_jax.load(model.export(tmp_path / "exported"))
    assert exported.config["objective"] == {"name": "wedlm"}
    for one in (model, exported):
        assert one.score("abcab").nats == pytest.approx(model.score("abcab").nats, rel=1e-5)
