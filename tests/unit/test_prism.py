"""Quality of tokens (PRISM): the loss by enumeration, samples, and numbers of the authors' code."""

import dataclasses
import itertools
from collections import Counter

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import answers, peer_folder
from tiny_networks import SIZES_OF, T
from tiny_networks import Z as TEXTS

import md4_jax
from md4_jax.networks.classifier import Classifier, PatchClassifier
from md4_jax.networks.quality import Judged, built
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.prism import Prism as Loss
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Accelerator, Prompt, UserError
from md4_jax.runtime.sharding import path_name
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import sample
from md4_jax.samplers.prism import Prism
from md4_jax.training.trainable import divided

P, V, MASKS = exact.P_V3L2, 3, Masking(3)
TOLD = answers("prism")


def code(z) -> np.ndarray:
    """Row of a table for each state of two tokens."""
    return np.asarray(z) @ [V + 1, 1]


def judged(logits: np.ndarray, quality: np.ndarray, digits=(V + 1, 1)):
    """The denoiser of two tables over states: logits [Z, L, V] and quality [Z, L]."""
    table = jnp.concatenate([jnp.asarray(logits), jnp.asarray(quality)[..., None]], axis=-1)
    features = lambda z, t: table[jnp.asarray(z) @ jnp.asarray(digits)]  # noqa: E731
    return exact.of_outputs(features)._replace(
        unembed=lambda h: h[..., :-1], quality=lambda h: h[..., -1]
    )


def parts(objective: Loss, denoiser, x, z, t=0.5, batch=None, seed=0) -> list[np.ndarray]:
    """Losses of masks and of quality, and the fraction of right tokens among the drawn ones."""
    times, keys = jnp.full(len(x), t), exact.keys_for(seed, len(x))
    batch = exact.batch_of(x) if batch is None else batch
    found = objective.parts(denoiser, MASKS, batch, jnp.asarray(z), times, keys)
    return [np.asarray(each) for each in found]


@pytest.mark.parametrize("fill", ["most_likely", "drawn"])
def test_the_best_quality_is_the_probability_of_a_token_given_the_others(fill, x64):
    """p(x_n = y_n | the other token, or a mask in its place), whichever network draws y_n."""
    x = np.repeat(exact.sequences(V, 2), 3, axis=0)
    z = np.where(np.tile([[1, 0], [0, 1], [1, 1]], (V**2, 1)), V, x)
    chance = np.repeat(P.ravel(), 3) / 3
    logits = exact.table_logits(V, 2)  # of a network that is wrong
    posterior, quality = np.exp(exact.perfect_logits(P)), np.zeros(((V + 1) ** 2, 2))
    for y in exact.sequences(V + 1, 2):
        for n in np.flatnonzero(y < V):
            without = np.where(np.arange(2) == n, V, y)
            p = posterior[code(without), n, y[n]]
            quality[code(y), n] = np.log(p) - np.log1p(-p)
    many = 1 if fill == "most_likely" else 400
    objective = Loss(tokens=1, fill=fill)
    rows = np.tile(np.arange(len(x)), many)

    def loss(table: np.ndarray) -> np.ndarray:
        return chance[rows] * parts(objective, judged(logits, table), x[rows], z[rows])[1]

    best = loss(quality)
    assert best.sum() > 0.3 * many
    rng = np.random.default_rng(0)
    for _ in range(4):  # with the same draws
        assert loss(quality + 0.5 * rng.normal(size=quality.shape)).sum() > best.sum()
    if fill == "most_likely":
        y = np.where(z == V, logits[code(z)].argmax(axis=2), z)
        p = 1 / (1 + np.exp(-quality))
        entropy = 0.0
        # Of two masks either is filled in, with probability 1/2: see the draws of the other case.
        for row in np.flatnonzero((z == V).sum(axis=1) == 1):
            n = np.flatnonzero(z[row] == V)[0]
            own = p[code(y[row]), n]
            entropy -= 2 * chance[row] * (own * np.log(own) + (1 - own) * np.log1p(-own))
        one = (z == V).sum(axis=1) == 1
        assert best[one].sum() == pytest.approx(entropy, rel=1e-9)


def test_masks_have_their_bound_and_quality_counts_once_for_each_token(x64):
    """c (N / k) sum over the drawn tokens; all masks if there are fewer than k."""
    denoiser, x = judged(exact.table_logits(V, 2), np.full((16, 2), np.log(3.0))), np.eye(2)
    x, z = x.astype(np.int32), np.full((2, 2), V)
    batch, t = exact.batch_of(x), jnp.full(2, 0.2)
    bound = MD4().loss_at(denoiser, MASKS, batch, jnp.asarray(z), t)
    y = exact.table_logits(V, 2)[-1].argmax(axis=1)
    costs = np.where(y == x, np.log(4 / 3), np.log(4.0))
    for tokens, share in ((2, 1.0), (8, 0.25), (0, 1.0)):
        found = parts(Loss(tokens=tokens, fill="most_likely"), denoiser, x, z, 0.2)
        np.testing.assert_allclose(found[0], bound, rtol=1e-12)
        np.testing.assert_allclose(found[1], share * costs.sum(axis=1), rtol=1e-12)
        np.testing.assert_allclose(found[2], (y == x).mean(axis=1))
    keys = exact.keys_for(1, 2)
    one, extra = Loss(quality=0.5)(denoiser, MASKS, batch, t, keys)
    two, more = Loss(quality=2.0)(denoiser, MASKS, batch, t, keys)
    np.testing.assert_allclose(two - one, 1.5 * extra["judging"], rtol=1e-12)
    assert (extra["judging"] == more["judging"]).all()


def test_drawn_tokens_have_the_networks_distribution_and_random_places():
    """Within 4 standard errors; texts of the same z_t have the same tokens at other places."""
    logits = np.tile(np.log([0.6, 0.3, 0.1]), (16, 2, 1))
    quality = np.zeros((16, 2))
    quality[code([[0, V], [1, V], [2, V]]), 0] = 5.0, 10.0, 20.0  # seen from the cost
    denoiser, x = judged(logits, quality), np.full((4000, 2), 2)
    cost = lambda q: np.logaddexp(0.0, [q, -q])  # noqa: E731  of wrong and right
    _, judging, _ = parts(Loss(tokens=1), denoiser, x, np.full_like(x, V))
    values = 2 * np.array([cost(5.0)[0], cost(10.0)[0], cost(20.0)[1], np.log(2.0)])
    counts = np.isclose(judging[:, None], values, rtol=1e-5).sum(axis=0)
    assert counts.sum() == len(x)
    expected = np.array([0.3, 0.15, 0.05, 0.5])
    errors = np.sqrt(expected * (1 - expected) * len(x))
    assert (np.abs(counts - expected * len(x)) < 4 * errors).all()
    _, judging, right = parts(Loss(tokens=1, texts=3), denoiser, x, np.full_like(x, V))
    sums = {
        round(float(2 / 3 * (n * first + (3 - n) * np.log(2.0))), 4)
        for first in values[:3] / 2
        for n in range(4)
    }
    assert {round(float(each), 4) for each in judging} == sums and len(sums) == 10
    assert abs(right.mean() - 0.1) < 4 * np.sqrt(0.09 / (2 * len(x)))


def test_surest_masks_may_be_filled_first_and_prompts_never():
    """The mask with the likelier token; a token that does not count is neither filled nor costs."""
    logits, quality = np.tile(np.log([0.6, 0.3, 0.1]), (16, 2, 1)), np.zeros((16, 2))
    logits[:, 0] = np.log([0.5, 0.4, 0.1])
    quality[code([V, 0]), 1] = 3.0
    options = dict(tokens=1, fill="most_likely", order="confidence")
    x, z = np.zeros((64, 2), np.int32), np.full((64, 2), V)
    _, judging, right = parts(Loss(**options), judged(logits, quality), x, z)
    np.testing.assert_allclose(judging, 2 * np.log1p(np.exp(-3.0)), rtol=1e-6)
    assert (right == 1).all()
    batch = exact.batch_of(x)._replace(loss_mask=np.tile([True, False], (64, 1)))
    quality[code([0, V]), 0] = 2.0
    _, judging, _ = parts(Loss(**options), judged(logits, quality), x, z, batch=batch)
    np.testing.assert_allclose(judging, np.log1p(np.exp(-2.0)), rtol=1e-6)


def test_no_gradient_passes_through_the_drawn_text():
    """Of the quality alone: the network's logits get none, its head does."""
    logits, quality = exact.table_logits(V, 2), exact.table_logits(V, 2)[..., 0]
    x = np.zeros((8, 2), np.int32)

    def loss(tables) -> jax.Array:
        found = Loss(tokens=2).parts(
            judged(*tables), MASKS, exact.batch_of(x), jnp.full_like(x, V), jnp.full(8, 0.5),
            exact.keys_for(0, 8),
        )  # fmt: skip
        return jnp.sum(found[1])

    of_logits, of_quality = jax.grad(loss)((jnp.asarray(logits), jnp.asarray(quality)))
    assert (of_logits == 0).all() and (of_quality != 0).any()


# Four tokens of two symbols, so that a step chooses among several that are drawn.
TWO, LENGTH, FOUR = 2, 4, [27, 9, 3, 1]


def law_of(logits: np.ndarray, quality: np.ndarray, step: Prism, steps: int) -> Counter:
    """Chances of texts of four tokens, by enumeration of the steps of a uniform grid."""
    law = Counter({(TWO,) * LENGTH: 1.0})
    for left in range(steps, 0, -1):
        t, now = left / steps, Counter()
        for z, chance in law.items():
            z = np.array(z)
            masks, row = np.flatnonzero(z == TWO), int(z @ FOUR)
            due = len(masks) - int(LENGTH * (left - 1) / steps + 1e-4)
            after, visible = len(masks) - due, np.flatnonzero(z < TWO)
            for number, odds in numbers(step, len(visible), after, step.until < t <= step.since):
                worst = visible[np.argsort(quality[row, visible])][:number]
                places = list(itertools.combinations(masks, due + len(worst)))
                for chosen in places:
                    for tokens in itertools.product(range(TWO), repeat=len(chosen)):
                        new, each = z.copy(), chance * odds / len(places)
                        for n, token in zip(chosen, tokens, strict=True):
                            mu = np.exp(logits[row, n]) / np.exp(logits[row, n]).sum()
                            new[n], each = token, each * mu[token]
                        new[worst] = TWO
                        now[tuple(new.tolist())] += each
        law = now
    return law


def numbers(step: Prism, drawn: int, after: int, active: bool):
    """(number of tokens to mask again, its probability)."""
    if not active:
        return [(0, 1.0)]
    if step.eta:
        sigma = min(step.eta, after / max(drawn, 1))
        masses = [
            (n, np.prod([(drawn - i) / (i + 1) for i in range(n)]) * sigma**n
             * (1 - sigma) ** (drawn - n)) for n in range(drawn + 1)
        ]  # fmt: skip
    else:
        whole = int(step.remasked)
        part = step.remasked - whole
        masses = [(whole, 1 - part), (whole + 1, part)]
    return [(min(n, after, drawn), p) for n, p in masses if p]


@pytest.mark.parametrize(
    "options, steps",
    [
        ({}, 4),
        ({"remasked": 2.0}, 4),
        ({"remasked": 0.4, "since": 0.7}, 4),
        ({"eta": 0.6}, 4),
        ({"remasked": 2.0, "until": 0.5}, 4),
        ({}, 2),
    ],
)
def test_samples_have_the_law_of_the_steps(options, steps):
    """By enumeration, within 4.5 standard errors."""
    logits, many = 1.5 * exact.table_logits(TWO, LENGTH), 12000
    quality, step = np.sin(7.0 * exact.table_logits(TWO, LENGTH))[..., 1], Prism(**options)
    z, used = exact.drawn(
        judged(logits, quality, FOUR), Masking(TWO), step, uniform(steps),
        exact.keys_for(3, many), length=LENGTH,
    )  # fmt: skip
    found, law = Counter(map(tuple, np.asarray(z).tolist())), law_of(logits, quality, step, steps)
    assert (np.asarray(used) == steps).all()
    assert sum(law.values()) == pytest.approx(1.0) and set(found) <= set(law)
    for key, chance in law.items():
        error = np.sqrt(chance * (1 - chance) / many)
        assert abs(found[key] / many - chance) < 4.5 * error + 1 / many, key


def test_tokens_that_are_given_are_never_masked():
    """Whatever their quality; a step masks the worst of the others."""
    quality = jnp.asarray([-5.0, 1.0, -2.0, 3.0, 0.0, 0.0])
    flat = exact.of_outputs(lambda z, t: jnp.zeros((*z.shape, V)))
    denoiser = flat._replace(quality=lambda h: jnp.broadcast_to(quality, h.shape[:-1]))
    chain = exact.chain_of([[0, 1, 2, 0, V, V]] * 8, np.tile(np.arange(6) == 0, (8, 1)))
    found = Prism()(
        denoiser, MASKS, chain, jnp.float32(0.2), jnp.float32(0.4), exact.keys_for(0, 8)
    )
    z = np.asarray(found.z)
    np.testing.assert_array_equal(z[:, [0, 1, 3]], [[0, 1, 0]] * 8)
    assert (z[:, 2] == V).all() and (z[:, 4:] < V).all()
    assert (np.asarray(found.confidence)[:, 2] == 0).all()


def test_eta_has_the_limit_of_remask():
    """(1 - alpha_s) / alpha_t = 2/3 of three tokens; two at most fit. 4 standard errors."""
    many = 4000
    chain = exact.chain_of([[0, 1, 2, V, V, V]] * many)
    found = Prism(eta=1.0)(
        exact.of_outputs(lambda z, t: jnp.zeros((*z.shape, V))), MASKS, chain,
        jnp.float32(0.34), jnp.float32(0.5), exact.keys_for(0, many),
    )  # fmt: skip
    z = np.asarray(found.z)
    assert ((z == V).sum(axis=1) == 2).all()
    again = np.bincount((z[:, :3] == V).sum(axis=1), minlength=3) / many
    law = np.array([1, 6, 20]) / 27
    assert (np.abs(again - law) < 4 * np.sqrt(law * (1 - law) / many)).all()


def test_the_order_may_be_that_of_confidence_and_the_given_stay():
    """The surest masks first, in blocks; a worst token of an earlier block is not masked again."""
    sure = np.array([0.0, 1.0, 2.0, 3.0])
    outputs = jnp.stack([sure, np.zeros(4), np.zeros(4)], axis=-1)
    seen = []

    def features(z, t):
        jax.debug.callback(lambda z: seen.append(np.asarray(z)[0].tolist()), z, ordered=True)
        return jnp.broadcast_to(outputs, (*z.shape, V))

    denoiser = exact.of_outputs(features)._replace(quality=lambda h: h[..., 0])
    step = Prism(order="confidence", remasked=1.0, split="even", semi_autoregressive=2)
    prompt = Prompt(jnp.asarray([[2, V, V, V]]), jnp.asarray([[True, False, False, False]]))
    sample(denoiser, MASKS, step, grid=uniform(4), keys=exact.keys_for(0, 1), prompt=prompt)
    masked = [[n for n, token in enumerate(z) if token == V] for z in seen]
    assert all(z[0] == 2 for z in seen)
    assert masked == [[1, 2, 3], [1, 3], [3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return peer_folder(tmp_path_factory.mktemp("prism"), "llada")


@pytest.fixture(scope="module")
def model(folder):
    """A published model with a head of quality that says something."""
    model = md4_jax.load(folder, {"network.quality": True})
    rng = np.random.default_rng(5)
    noisy = lambda x: np.asarray(x + 0.5 * rng.normal(size=x.shape), np.float32)  # noqa: E731
    head = jax.tree.map(noisy, model.params["network"]["quality"])
    network = {**model.params["network"], "quality": head}
    return dataclasses.replace(model, params={**model.params, "network": network})


@pytest.mark.parametrize("number", range(len(TOLD)))
def test_the_losses_of_its_own_code(number, model):
    """Of the trainer for LLaDA, which fills in the surest masks by their most likely tokens."""
    told = TOLD[number]
    denoiser, process = model.experiment.network.denoiser(model.params), model.experiment.process
    scaled = denoiser._replace(
        unembed=lambda h: told["scale"] * denoiser.unembed(h), accelerator=Accelerator()
    )
    x, masked = np.array(told["x"]), np.array(told["masked"], bool)
    objective = Loss(tokens=told["tokens"], fill="most_likely", order="confidence")
    found = objective.parts(
        scaled, process, exact.batch_of(x), jnp.where(masked, process.mask_id, x),
        jnp.asarray(told["t"]), exact.keys_for(0, len(x)),
    )  # fmt: skip
    assert np.mean(found[0]) == pytest.approx(told["masks"], rel=1e-5)
    assert np.mean(found[1]) / x.shape[1] == pytest.approx(told["quality"], rel=1e-5)


Z = np.array([[3, 1, 125, 7, 125, 0], [5, 125, 2, 2, 9, 125]])


def test_a_published_model_can_be_given_the_head(folder, model, tmp_path, capsys):
    """Without a change of its logits; saved with the head, and exported without it."""
    plain, fresh = md4_jax.load(folder), md4_jax.load(folder, {"network.quality": True})
    assert fresh.logits(Z, 0.3).tobytes() == plain.logits(Z, 0.3).tobytes()
    assert fresh.size - plain.size == 32 * 32 + 2 * 32 + 2 * 32 + 1
    h = fresh.experiment.network.denoiser(fresh.params)
    assert (h.quality(h.features(Z, jnp.zeros(2))) == 0).all()
    again = md4_jax.load(model.save(tmp_path / "saved"))
    for name, x in traversed(model.params["network"]["quality"]):
        found = dict(traversed(again.params["network"]["quality"]))[name]
        np.testing.assert_array_equal(np.asarray(found), x)
    model.export(tmp_path / "out")
    assert "without the head of network.quality" in capsys.readouterr().err
    out = md4_jax.load(tmp_path / "out")
    np.testing.assert_array_equal(out.logits(Z, 0.3), plain.logits(Z, 0.3))


def traversed(tree):
    """(path, array) of each leaf."""
    return [(str(path), np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def test_it_samples_wherever_masks_are_unmasked(model, folder):
    """Whole texts and blocks within them, with guidance; models without the head are told so."""
    options = dict(sampler="prism", steps=6, length=16, num=2, prompt="ab")
    for more in ({}, {"semi_autoregressive": 4, "split": "even", "grid": "uniform"}, {"eta": 0.5},
                 {"order": "confidence", "guidance": 2.0}):  # fmt: skip
        texts = model.sample(**options, **more).texts
        assert len(texts) == 2 and all(text.startswith("ab") for text in texts), more
    with pytest.raises(UserError, match="sample.name='prism' needs network.quality=True"):
        md4_jax.load(folder).sample(**options)
    with pytest.raises(UserError, match="not for network.causal=True"):
        built(Transformer(5, causal=True, quality=True, size=16, heads=2, depth=1), "cpu")


JUDGED = [make for make in SIZES_OF if issubclass(make, Judged)]


@pytest.mark.parametrize("make", JUDGED, ids=[make.__name__ for make in JUDGED])
def test_every_network_of_texts_can_have_the_head(make):
    """Beside its logits; classifiers, which predict no tokens, are refused."""
    options = make(**SIZES_OF[make], quality=True)
    if make in (Classifier, PatchClassifier):
        with pytest.raises(UserError, match="not for network.name of a classifier"):
            built(options, "cpu")
        return
    network = built(options, "cpu")

    def outputs(params):
        denoiser = network.bind(params)
        return denoiser.quality(denoiser.features(TEXTS, T)), denoiser(TEXTS, T)

    quality, logits = jax.eval_shape(outputs, jax.eval_shape(network.init, jax.random.key(0)))
    assert quality.shape == logits.shape[:2] == TEXTS.shape and network.quality


def test_adapters_and_the_head_are_trained():
    """And nothing else."""
    options = Transformer(**SIZES_OF[Transformer], lora_rank=2, quality=True)
    network = built(options, "cpu")
    whole = {"network": jax.eval_shape(network.init, jax.random.key(0)), "process": ()}
    trained, frozen = (
        [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(part["network"])]
        for part in divided(whole, network, "")
    )
    kinds = ("lora_", "quality/")
    assert all(any(kind in path for kind in kinds) for path in trained)
    assert all(any(kind in path for path in trained) for kind in kinds)
    assert frozen and not any(kind in path for path in frozen for kind in kinds)


def test_the_head_follows_its_denoiser(model):
    """To repeated rows, and to a context of its own."""
    denoiser = model.experiment.network.denoiser(model.params)
    for other in (denoiser.repeated(2), denoiser.within(jnp.zeros(Z.shape, jnp.int32))):
        h = denoiser.features(Z, jnp.zeros(2))
        np.testing.assert_array_equal(other.quality(h), denoiser.quality(h))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"remasked": -1.0}, "sample.remasked must not be negative, not -1.0"),
        ({"eta": 1.5}, r"sample.eta must lie in \[0, 1\], not 1.5"),
        ({"since": 0.5, "until": 0.5}, "need 0 <= until < since <= 1, not 0.5 and 0.5"),
        ({"order": "surest"}, "sample.order must be 'random' or 'confidence', not 'surest'"),
        ({"rule": "threshold", "limit": 0.9}, "sample.rule='threshold' is only for .*'confidence'"),
        ({"order": "confidence", "edit": 0.5}, "sample.edit=0.5 replaces tokens"),
    ],
)
def test_impossible_options_are_refused(options, match):
    with pytest.raises(UserError, match=match):
        Prism(**options)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"quality": 0.0}, "objective.quality must be above 0, not 0.0"),
        ({"tokens": -1}, "objective.tokens must be at least 0, not -1"),
        ({"tokens": 0, "texts": 2}, "objective.texts=2 is only for .* objective.tokens above 0"),
        ({"texts": 0}, "objective.texts must be at least 1, not 0"),
        ({"fill": "any"}, "objective.fill must be 'most_likely' or 'drawn', not 'any'"),
        ({"order": "any"}, "objective.order must be 'random' or 'confidence', not 'any'"),
        ({"order": "confidence", "texts": 2}, "objective.texts=2 is only for .*'random'"),
        ({"least_time": 1.0}, r"objective.least_time must lie in \[0, 1\), not 1.0"),
    ],
)
def test_impossible_losses_are_refused(options, match):
    with pytest.raises(UserError, match=match):
        Loss(**options)
