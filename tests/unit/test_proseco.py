"""Self-correction (ProSeCo): the loss by enumeration, samples, and runs of the authors' sampler."""

import itertools
from collections import Counter

import exact
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import answers, peer_folder

import md4_jax
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.proseco import ProSeCo as Loss
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Prompt, UserError
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.proseco import ProSeCo

P, V, MASKS = exact.P_V3L2, 3, Masking(3)
TOLD = answers("proseco")


def code(z) -> np.ndarray:
    """Row of a table of logits for each state."""
    return np.asarray(z) @ [V + 1, 1]


def parts(objective: Loss, denoiser, x, z, t=0.5, batch=None) -> list[np.ndarray]:
    """Losses of unmasking and of correction, and which tokens of the filled text are wrong."""
    times, keys = jnp.full(len(x), t), exact.keys_for(0, len(x))
    batch = exact.batch_of(x) if batch is None else batch
    found = objective.parts(denoiser, MASKS, batch, jnp.asarray(z), times, keys)
    return [np.asarray(each) for each in found]


def test_the_best_correction_is_the_posterior_given_the_filled_text(x64):
    """The loss is then the entropy of each token given y, and any other network has more."""
    masks = exact.patterns(2)
    x = np.repeat(exact.sequences(V, 2), len(masks), axis=0)
    z = np.where(np.tile(masks, (V**2, 1)), V, x)
    probability = np.repeat(P.ravel() / len(masks), len(masks))
    logits, entropy = exact.perfect_logits(P), 0.0
    y = np.where(z == V, logits[code(z)].argmax(axis=2), z)
    for row in np.unique(y, axis=0):
        here = (y == row).all(axis=1)
        for n in range(2):
            mass = np.array([probability[here & (x[:, n] == k)].sum() for k in range(V)])
            entropy -= sum(m * np.log(m / mass.sum()) for m in mass if m)
            logits[code(row), n] = np.log(np.maximum(mass / mass.sum(), 1e-300))
    clean = (exact.sequences(V + 1, 2) != V).all(axis=1)[:, None, None]

    def loss(table: np.ndarray) -> float:
        return probability @ parts(Loss(), exact.denoiser_of(table), x, z)[1]

    assert loss(logits) == pytest.approx(entropy, rel=1e-9) and entropy > 0.3
    rng = np.random.default_rng(0)
    for _ in range(3):
        assert loss(logits + 0.3 * clean * rng.normal(size=logits.shape)) > entropy + 1e-4


def test_unmasking_is_the_bound_of_masks(x64):
    """At each time and text; the correction has the same weight, -alpha' / (1 - alpha) = 1 / t."""
    denoiser, x = exact.denoiser_of(exact.table_logits(V, 2), time=1.0), exact.sequences(V, 2)
    z = np.where(x == 1, V, x)
    batch, t = exact.batch_of(x), jnp.full(len(x), 0.2)
    found = parts(Loss(weighted=True), denoiser, x, z, 0.2)
    bound = MD4().loss_at(denoiser, MASKS, batch, jnp.asarray(z), t)
    np.testing.assert_allclose(found[0], bound, rtol=1e-12)
    plain = parts(Loss(), denoiser, x, z, 0.2)
    np.testing.assert_allclose(found[1], 5.0 * plain[1], rtol=1e-12)
    whole, extra = Loss(correction=0.5)(denoiser, MASKS, batch, t, exact.keys_for(1, len(x)))
    plain, more = Loss(correction=1.5)(denoiser, MASKS, batch, t, exact.keys_for(1, len(x)))
    np.testing.assert_allclose(plain - whole, extra["correction"], rtol=1e-12)
    assert (extra["correction"] == more["correction"]).all() and extra["wrong"].max() > 0


LIKELY = np.log([0.6, 0.3, 0.1])  # says 0 everywhere


@pytest.mark.parametrize(
    "options, expected",
    [
        # x = (0, 1, 2) from (mask, mask, 2): y = (0, 0, 2), and with all tokens drawn (0, 0, 0).
        ({}, -np.log([0.6, 0.3, 0.1]).sum()),
        ({"upweighted": True}, -0.6 - np.log(0.3) - 0.1),
        ({"upweighted": True, "everywhere": True}, -0.6 - np.log(0.3) - np.log(0.1)),
    ],
)
def test_wrong_tokens_can_weigh_more(options, expected):
    denoiser = exact.of_outputs(lambda z, t: jnp.broadcast_to(LIKELY, (*z.shape, V)))
    x, z = np.array([[0, 1, 2]]), np.array([[V, V, 2]])
    _, correction, wrong = parts(Loss(**options), denoiser, x, z)
    np.testing.assert_allclose(correction, expected, rtol=1e-6)
    assert wrong[0].tolist() == [False, True, options.get("everywhere", False)]


def test_masks_may_be_filled_by_draws_and_prompts_stay():
    """Draws within 4 standard errors; tokens that do not count are neither replaced nor cost."""
    denoiser = exact.of_outputs(lambda z, t: jnp.broadcast_to(LIKELY, (*z.shape, V)))
    x = np.zeros((4000, 2), np.int32)
    _, _, wrong = parts(Loss(fill="drawn"), denoiser, x, np.full_like(x, V))
    assert abs(wrong.mean() - 0.4) < 4 * np.sqrt(0.24 / wrong.size)
    batch = exact.batch_of([[2, 1]])._replace(loss_mask=np.array([[False, True]]))
    objective = Loss(everywhere=True)
    _, correction, wrong = parts(objective, denoiser, [[2, 1]], [[2, V]], batch=batch)
    assert wrong.tolist() == [[False, True]] and correction == pytest.approx(-np.log(0.3))


def test_times_begin_at_the_least_one():
    denoiser, x = exact.denoiser_of(exact.table_logits(V, 2)), np.zeros((4000, 2), np.int32)
    for least, u in ((0.25, 0.0), (0.25, 1.0)):
        times = jnp.full(len(x), u)
        _, extra = Loss(least_time=least)(
            denoiser, MASKS, exact.batch_of(x), times, exact.keys_for(0, len(x))
        )
        masked, t = extra["masked"].mean(), least + (1 - least) * u
        assert abs(masked - t) <= 4 * np.sqrt(t * (1 - t) / (2 * len(x)))


def after(table: np.ndarray, z: np.ndarray, corrections: int) -> tuple[np.ndarray, np.ndarray, int]:
    """State and logits after a correction, and its evaluations."""
    y, logits = np.where(z == V, table[code(z)].argmax(axis=1), z), table[code(z)]
    for number in range(corrections):
        logits = table[code(y)]
        new = logits.argmax(axis=1)
        if (new == y).all():
            return np.where(z == V, V, y), logits, number + 1
        y = new
    return np.where(z == V, V, y), logits, corrections


def law_of(table: np.ndarray, steps: int, corrections: int, every: int) -> Counter:
    """Chances of (text, evaluations), by enumeration; step i reveals a mask with chance 1/i."""
    law = Counter({((V, V), 0, 0): 1.0})  # state, steps that drew tokens, evaluations
    for left in range(steps, 0, -1):
        now = Counter()
        for (z, drew, used), chance in law.items():
            z = np.array(z)
            for chosen in exact.patterns(2):
                if (chosen & (z != V)).any():
                    continue
                each = np.where(chosen, 1 / left, 1 - 1 / left)[z == V].prod()
                if not chosen.any():
                    now[tuple(z.tolist()), drew, used] += chance * each
                    continue
                state, logits, more = z, table[code(z)], 0
                if (drew + 1) % every == 0:
                    state, logits, more = after(table, z, corrections)
                mu = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
                picks = [range(V) if chosen[n] else [int(state[n])] for n in range(2)]
                for new in itertools.product(*picks):
                    odds = mu[np.arange(2), np.minimum(new, V - 1)][chosen].prod()
                    now[new, drew + 1, used + 1 + more] += chance * each * odds
        law = now
    found = Counter()
    for (z, _, used), chance in law.items():
        found[z, used] += chance
    return found


@pytest.mark.parametrize("steps, corrections, every", [(4, 6, 1), (3, 1, 2)])
def test_samples_have_the_law_of_the_steps(steps, corrections, every):
    """Texts and their numbers of evaluations, by enumeration; within 4.5 standard errors."""
    table, many = 1.5 * exact.table_logits(V, 2), 6000
    for text in ([0, 1], [2, 2]):  # which corrections do not change
        table[code(text), [0, 1], text] += 4.0
    step = ProSeCo(corrections=corrections, every=every)
    z, used = exact.drawn(
        exact.denoiser_of(table), MASKS, step, uniform(steps), exact.keys_for(3, many)
    )
    found = Counter(zip(map(tuple, np.asarray(z).tolist()), np.asarray(used).tolist(), strict=True))
    law = law_of(table, steps, corrections, every)
    assert sum(law.values()) == pytest.approx(1.0) and set(found) <= set(law)
    assert len({used for _, used in law}) > 1
    for key, chance in law.items():
        error = np.sqrt(chance * (1 - chance) / many)
        assert abs(found[key] / many - chance) < 4.5 * error + 1 / many, key


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> a loaded model."""
    folder = tmp_path_factory.mktemp("proseco")
    return lambda name: md4_jax.load(peer_folder(folder / name, name))


@pytest.fixture(scope="module")
def llada(models):
    return models("llada")


def run(model, prompts: list[list[int]], length: int, scale: float = 1.0, **options):
    """(texts, evaluations) at temperature 0, of texts that begin with prompts."""
    asked = dict(name="proseco", temperature=0.0, grid="uniform", length=length)
    experiment = model.sampling(asked | options)
    rows = len(prompts)
    tokens, given = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], given[row, : len(prompt)] = prompt, True
    denoiser = experiment.network.denoiser(model.params)
    chain, _ = experiment.loop(
        denoiser._replace(unembed=lambda h: scale * denoiser.unembed(h)),
        experiment.process, experiment.sampler_step,
        grid=experiment.grid, keys=exact.keys_for(0, rows), prompt=Prompt(tokens, given),
    )  # fmt: skip
    return np.asarray(chain.z).tolist(), np.asarray(chain.evaluations).tolist()


@pytest.mark.parametrize("number", range(len(TOLD)))
@pytest.mark.cases(3)
def test_the_tokens_and_evaluations_of_its_own_code(number, llada):
    """Of the sampler for LLaDA, block by block; the same in a batch with another prompt."""
    told = TOLD[number]
    options = {key: told[key] for key in ("corrections", "every", "steps", "scale")}
    options |= dict(order="confidence", semi_autoregressive=told["block"])
    if "threshold" in told:
        options |= dict(rule="threshold", limit=told["threshold"])
    else:
        options |= dict(split="even")
    prompts = [told["prompt"], told["prompt"][::-1]]
    texts, used = run(llada, prompts, len(told["tokens"]), **options)
    assert texts[0] == told["tokens"] and used[0] == told["evaluations"]


def test_a_given_end_is_read_and_stays(llada):
    """Also behind the block that is drawn, where other positions are filled but not corrected."""
    experiment = llada.sampling(
        dict(name="proseco", order="confidence", semi_autoregressive=4, length=16, steps=8)
    )
    tokens, given = np.full((2, 16), 7, np.int32), np.zeros((2, 16), bool)
    given[:, [0, 1, 9, 15]] = True
    tokens[1, 15] = 40
    chain, _ = experiment.loop(
        experiment.network.denoiser(llada.params), experiment.process, experiment.sampler_step,
        grid=experiment.grid, keys=exact.keys_for(0, 2), prompt=Prompt(tokens, given),
    )  # fmt: skip
    z = np.asarray(chain.z)
    np.testing.assert_array_equal(z[given], tokens[given])
    assert (z[0] != z[1])[:15].any() and (z < experiment.process.mask_id).all()


def test_its_checkpoint_is_an_mdlm_that_corrects(models, tmp_path):
    """With the logits and the bound of the MDLM with the same arrays; it is written as its own."""
    plain, model = models("mdlm"), models("proseco")
    assert model.config["objective"]["name"] == model.config["sample"]["name"] == "proseco"
    tokens = np.random.default_rng(0).integers(0, 11, (3, 16)).astype(np.int32)
    np.testing.assert_array_equal(model.logits(tokens), plain.logits(tokens))
    texts = [model.domain.decode(row) for row in tokens]
    found, expected = model.score(texts), plain.score(texts)
    np.testing.assert_array_equal(found.nats, expected.nats)
    assert found.objective == expected.objective and not found.exact
    model.export(tmp_path / "out")
    again = md4_jax.load(tmp_path / "out")
    assert again.config["objective"]["name"] == "proseco"
    np.testing.assert_array_equal(again.logits(tokens), model.logits(tokens))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"corrections": 0}, "sample.corrections must be at least 1, not 0"),
        ({"every": 0}, "sample.every must be at least 1, not 0"),
        ({"order": "surest"}, "sample.order must be 'random' or 'confidence', not 'surest'"),
        ({"rule": "threshold", "limit": 0.9}, "sample.rule='threshold' is only for .*'confidence'"),
        ({"order": "confidence", "edit": 0.5}, "sample.edit=0.5 replaces tokens"),
    ],
)
def test_impossible_options_are_refused(options, match, llada):
    with pytest.raises(UserError, match=match):
        llada.sampling({"name": "proseco", **options})


@pytest.mark.parametrize(
    "options, match",
    [
        ({"correction": 0.0}, "objective.correction must be above 0, not 0.0"),
        ({"fill": "any"}, "objective.fill must be 'most_likely' or 'drawn', not 'any'"),
        ({"least_time": 1.0}, r"objective.least_time must lie in \[0, 1\), not 1.0"),
    ],
)
def test_impossible_losses_are_refused(options, match):
    with pytest.raises(UserError, match=match):
        Loss(**options)
