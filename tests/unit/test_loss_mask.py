"""The tokens that do not count: prompts are conditioned on in every objective, padding is not."""

import itertools
import math

import chains
import exact
import interpolating
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.autoregressive import AlongOrder, Autoregressive
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.concrete_score import ConcreteScore
from md4_jax.objectives.cross_entropy import CrossEntropy
from md4_jax.objectives.ctmc import CTMC
from md4_jax.objectives.d3pm import D3PM
from md4_jax.objectives.genmd4 import GenMD4
from md4_jax.objectives.gidd import GIDD
from md4_jax.objectives.md4 import MD4, DiscreteMD4
from md4_jax.objectives.radd import TDCE, LambdaDCE
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.hybrid import Hybrid
from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import Cosine
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Batch, Denoiser, batch_of

ROWS, LENGTH, VOCAB = 24, 4, 3
RNG = np.random.default_rng(0)
X = RNG.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
MASK = RNG.random((ROWS, LENGTH)) < 0.5
MASK[0], MASK[1] = True, False
U = jnp.asarray((np.arange(ROWS) + 0.5) / ROWS, jnp.float32)
KEYS = exact.keys_for(1, ROWS)
every_pair = pytest.mark.parametrize(
    "objective, make_process",
    [
        pytest.param(*pair, id=name, marks=[pytest.mark.campaign] * (name.count(",") > 1))
        for name, pair in exact.FITTING.items()
        # These predict no tokens, or hide the end of a prompt in a window: tests of their own.
        if not name.startswith(("classifier", "sdlm"))
    ],
)


def watched(x, loss_mask, elsewhere=0.0, weight=1.0) -> Denoiser:
    """Outputs of z and t, nan where z is not x at a token that does not count.

    elsewhere is added to the outputs at tokens that do not count; weight scales all outputs.
    """
    place, symbol = jnp.arange(x.shape[1])[:, None], jnp.arange(VOCAB)

    def outputs(z, t):
        t = t.reshape(len(t), -1)[:, :1, None]
        wave = jnp.sin(1.0 + 2.1 * jnp.sum(z, axis=1)[:, None, None] + 3.7 * place + 5.3 * symbol)
        wave = weight * (wave + 0.3 * jnp.cos(3.0 * t + symbol))
        wave = wave + jnp.where(loss_mask, 0.0, elsewhere)[..., None] * symbol
        noised = jnp.any((z != x) & ~loss_mask, axis=1)
        return jnp.where(noised[:, None, None], jnp.nan, wave)

    def rebind(count):
        several = (jnp.repeat(jnp.asarray(a), count, axis=0) for a in (x, loss_mask))
        return watched(*several, elsewhere, weight)

    def streams(z, clean, t, rank, round, index):
        # All of both texts, also what an order would hide: it must be x where nothing counts.
        # The clean text's outputs are those for the next token.
        h = jnp.concatenate([outputs(z, t), jnp.roll(outputs(clean, t), -1, axis=1)], axis=1)
        return h if index is None else jnp.take_along_axis(h, index[..., None], axis=1)

    denoiser = exact.of_outputs(outputs)
    ordered = denoiser.ordered._replace(streams=streams)
    return denoiser._replace(rebind=rebind, ordered=ordered)


def shifted(x, loss_mask, **settings) -> Denoiser:
    """The same for a network that reads the sequence one position later."""
    inner = watched(x, loss_mask, **settings)

    def outputs(z, t):
        before = jnp.concatenate([z[:, 1:], x[:, -1:]], axis=1)
        begins = jnp.where(z[:, :1] == VOCAB, 0.0, jnp.nan)
        return inner.features(before, t) + begins[..., None]

    return exact.of_outputs(outputs)


def growing(x, loss_mask, elsewhere=0.0, weight=1.0) -> Denoiser:
    """The same for texts that grow: nan where z has lost a token of the prompt.

    elsewhere is added to what is said behind the end of z.
    """
    text = jnp.cumsum(loss_mask[:, ::-1], axis=1)[:, ::-1] > 0
    given = jnp.sum(text & ~loss_mask, axis=1)

    def gaps(z, t):
        absent = z == VOCAB + 1
        code = 1.0 + 2.1 * jnp.sum(z, axis=1)[:, None] + 3.7 * jnp.arange(LENGTH + 1) + t[:, None]
        behind = jnp.pad(absent, ((0, 0), (1, 0)))
        said = weight * jnp.sin(code) + jnp.where(behind, elsewhere, 0.0)
        wave = weight * jnp.sin(code[:, :, None] + 5.3 * jnp.arange(VOCAB))
        wave = wave + jnp.where(behind, elsewhere, 0.0)[..., None] * jnp.arange(VOCAB)
        lost = jnp.sum(z < VOCAB, axis=1) < given
        return jnp.where(lost[:, None, None], jnp.nan, wave), said

    def edits(z, t):
        h, said = gaps(z, t)
        return h, 0.5 * h, jnp.stack([said, 0.5 - said], axis=-1)

    return Denoiser(None, lambda h: h, gaps=gaps, edits=edits)


def call(objective, process, batch, **settings):
    make = shifted if isinstance(objective, Autoregressive) else watched
    make = growing if objective.needs.gaps else make
    denoiser = make(jnp.asarray(batch.tokens), jnp.asarray(batch.loss_mask), **settings)
    return objective(denoiser, process, exact.with_opinions(batch), U, KEYS)[0]


@pytest.mark.quick(11)
@every_pair
@pytest.mark.cases(20)
def test_what_does_not_count_is_neither_noised_nor_counted(objective, make_process):
    """The network sees x there, its outputs there change nothing, and an empty row costs 0."""
    process, batch = make_process(vocab_size=VOCAB), batch_of(X, loss_mask=MASK)
    told = jax.jit(lambda elsewhere: call(objective, process, batch, elsewhere=elsewhere))
    nats, other = (np.asarray(told(jnp.float32(junk))) for junk in (0.0, 2.0))
    assert np.isfinite(nats).all() and (np.abs(nats) > 0).sum() >= ROWS / 3
    np.testing.assert_array_equal(other, nats)
    assert (nats[~MASK.any(axis=1)] == 0).all()


@pytest.mark.quick(4)
@pytest.mark.cases(6)
@every_pair
def test_an_empty_batch_has_no_gradient_and_a_partial_one_a_finite_one(objective, make_process):
    """In the network's outputs and in what the process learns."""
    process = make_process(vocab_size=VOCAB)

    def loss(weight, process, mask):
        batch = batch_of(X, loss_mask=mask)
        return jnp.sum(call(objective, process, batch, weight=weight))

    slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for mask in (np.zeros_like(MASK), MASK):
        found = jax.tree.leaves(slopes(jnp.float32(1.0), process, mask))
        assert all(np.isfinite(leaf).all() for leaf in found)
        assert (np.abs(found[0]) > 1e-4) == mask.any()


@pytest.mark.quick(4)
@pytest.mark.cases(6)
@every_pair
def test_where_all_counts_the_mask_changes_nothing(objective, make_process):
    """To the bit: rows that count in full beside rows that do not, and beside others alike."""
    process, full = make_process(vocab_size=VOCAB), MASK.all(axis=1, keepdims=True)
    mask = np.where(np.arange(ROWS)[:, None] % 2 == 0, True, MASK | full)
    mixed = np.asarray(call(objective, process, batch_of(X, loss_mask=mask)))
    alone = np.asarray(call(objective, process, batch_of(X)))
    np.testing.assert_array_equal(mixed[::2], alone[::2])


# What follows is in double precision: the first token is a prompt, and P is the law of all three.
P = exact.P_V2L3
REST = exact.sequences(2, 2)


def conditional(p: np.ndarray, first: int) -> np.ndarray:
    return p[first] / p[first].sum()


class Prompted:
    """An objective of what comes after a prompt, for the enumerations of a whole sequence."""

    def __init__(self, objective, *prompt: int):
        self._objective, self._prompt = objective, jnp.asarray(prompt)

    def __getattr__(self, name):
        return getattr(self._objective, name)

    def _whole(self, z):
        prompt = jnp.broadcast_to(self._prompt, (len(z), len(self._prompt)))
        return jnp.concatenate([prompt, z], axis=1)

    def _batch(self, batch: Batch) -> Batch:
        tokens = self._whole(batch.tokens)
        counts = jnp.arange(tokens.shape[1]) >= len(self._prompt)
        return batch_of(tokens, loss_mask=jnp.broadcast_to(counts, tokens.shape))

    def loss_at(self, denoiser, process, batch, z, t):
        return self._objective.loss_at(denoiser, process, self._batch(batch), self._whole(z), t)

    def loss_at_pair(self, denoiser, process, batch, z, t, *, jumped):
        arguments = self._batch(batch), self._whole(z), t
        return self._objective.loss_at_pair(
            denoiser, process, *arguments, jumped=self._whole(jumped)
        )

    def ends(self, process, batch):
        return self._objective.ends(process, self._batch(batch))

    def prior(self, process, batch):
        return self._objective.prior(process, self._batch(batch))

    def reconstruction(self, process, batch):
        return self._objective.reconstruction(process, self._batch(batch))


def after(make, p: np.ndarray) -> Denoiser:
    """The denoiser of all tokens, make(law) of those that come after the first; junk at it."""
    each = [make(conditional(p, first)) for first in range(len(p))]

    def outputs(z, t):
        rest = jnp.stack([denoiser.features(z[:, 1:], t) for denoiser in each])
        chosen = rest[z[:, 0], jnp.arange(len(z))]
        return jnp.concatenate([jnp.sin(9.0 * chosen[:, :1]), chosen], axis=1)

    return exact.of_outputs(outputs)


def perfect(shift: float = 0.0):
    """law -> its denoiser on masks; a shift of log V makes log-probabilities scaled scores."""
    return lambda p: exact.denoiser_of(exact.perfect_logits(p) + shift)


def over_masks(objective, denoiser, process, **rule) -> np.ndarray:
    """The mean of loss_at over t ~ U(0, 1) and masks of the rest: [X]."""
    t, weight = exact.quadrature(**rule)
    if isinstance(objective._objective, TDCE):
        # Its constant is singular at both ends.
        t, weight = np.concatenate([0.5 * t, 1.0 - 0.5 * t]), 0.5 * np.concatenate([weight] * 2)
    noise = process.schedule.one_minus_alpha(jnp.asarray(t))
    if isinstance(objective._objective, LambdaDCE):
        noise = t
    loss_at = exact.bind(objective, denoiser, process)
    return exact.expected(loss_at, process.mask_id, REST, t, noise) @ weight


ON_MASKS = {
    "md4": (MD4(), {}),
    "md4, cosine": (MD4(), {}),
    "lambda_dce": (LambdaDCE(), {}),
    "score_entropy": (ScoreEntropy(), dict(nodes=60)),
    "t_dce": (TDCE(), dict(nodes=400, power=6)),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ON_MASKS)
@pytest.mark.cases(5)
def test_the_perfect_denoiser_has_the_nats_of_the_rest_given_the_prompt(name, first, x64):
    objective, rule = ON_MASKS[name]
    process = Masking(2, *([Cosine()] if "cosine" in name else []))
    denoiser = after(perfect(math.log(2) if name == "score_entropy" else 0.0), P)
    found = over_masks(Prompted(objective, first), denoiser, process, **rule)
    np.testing.assert_allclose(found, -np.log(conditional(P, first)).ravel(), rtol=1e-9)


@pytest.mark.parametrize("first", [0, 1])
def test_any_order_of_the_rest(first, x64):
    """The weight is n / k of the n = 2 tokens that count, not of three."""
    objective, process = Prompted(AnyOrder(), first), Masking(2)
    found = exact.any_order(after(perfect(), P), process, REST, objective)
    np.testing.assert_allclose(found, -np.log(conditional(P, first)).ravel(), rtol=1e-9)


def test_any_order_draws_the_counts_of_the_rest():
    """Of rows with 1 to 4 tokens that count: u in n equal parts masks 1 to n of them."""
    process, u = Masking(VOCAB), jnp.asarray([0.1, 0.4, 0.6, 0.9])
    for tokens in range(1, 5):
        mask = np.arange(LENGTH) >= LENGTH - tokens
        batch = batch_of(X[:4], loss_mask=np.broadcast_to(mask, (4, LENGTH)))
        _, extra = AnyOrder()(watched(*batch[:2]), process, batch, u, KEYS[:4])
        expected = np.floor(np.asarray(u) * tokens) + 1
        np.testing.assert_allclose(extra["masked"] * LENGTH, expected, rtol=1e-6)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_every_order_reveals_the_rest_alone(order, x64):
    """exp of minus the nats along any order, prompt anywhere in it, is the conditional law."""
    for first in range(2):
        tokens = np.concatenate([np.full((4, 1), first), REST], axis=1)
        batch = batch_of(tokens, loss_mask=np.tile([False, True, True], (4, 1)))
        rows = jnp.broadcast_to(jnp.asarray(order), tokens.shape)
        denoiser = exact.denoiser_of(exact.perfect_logits(P))
        found = AlongOrder().loss_along(denoiser, Masking(2), batch, rows)
        np.testing.assert_allclose(found, -np.log(conditional(P, first)).ravel(), rtol=1e-9)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("objective", [DiscreteMD4, D3PM])
def test_one_token_given_the_other_with_any_number_of_steps_of_masks(objective, steps, x64):
    p, x = exact.P_V3L2, exact.sequences(3, 1)
    process, denoiser = Masking(3, Cosine()), after(perfect(), p)
    for first in range(3):
        made = Prompted(objective(steps), first)
        if objective is D3PM:
            # Of the same law of masks; identity D02.
            made.first_step = 1
            made.masked_probability = DiscreteMD4(steps).masked_probability
        found = exact.discrete(made, denoiser, process, x)
        np.testing.assert_allclose(found, -np.log(conditional(p, first)), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False], ids=["closed form", "matrices"])
@pytest.mark.cases(1)
def test_one_token_given_the_other_with_uniform_steps(closed, x64):
    """Of identity D05: exact once z_T is coded by its own law, given the prompt."""
    p, x, steps = exact.P_V3L2, exact.sequences(3, 1), 3
    schedule = Cosine()
    process = Transition(3, schedule, steps, "uniform", parametrisation="mixture")
    if closed:
        process = Uniform(3, schedule, "mixture")
    alphas = [float(schedule.alpha(jnp.float64(i / steps))) for i in range(1, steps + 1)]
    laws = [alpha * np.eye(3) + (1.0 - alpha) / 3 for alpha in alphas]
    reach = jnp.asarray(np.stack(laws))

    def make(law):
        def outputs(z, t):
            step = jnp.round(t * steps).astype(int) - 1
            return jnp.log(jnp.asarray(law) * reach.swapaxes(1, 2)[step[:, None], z])

        return exact.of_outputs(outputs)

    denoiser = after(make, p)
    for first in range(3):
        objective = Prompted(D3PM(steps), first)
        total = np.asarray(objective.prior(process, exact.batch_of(x)))
        for step, state in itertools.product(range(1, steps + 1), range(3)):
            z, times = jnp.full((3, 1), state), jnp.full(3, step)
            nats = objective.loss_at(denoiser, process, exact.batch_of(x), z, times)
            total = total + laws[step - 1][:, state] * np.asarray(nats) / steps
        law = conditional(p, first)
        total -= laws[-1] @ np.log(3 * (law @ laws[-1]))
        np.testing.assert_allclose(total, -np.log(law), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
@pytest.mark.parametrize("objective", [ScoreEntropy(), UniformELBO()])
@pytest.mark.cases(3)
def test_the_rest_on_uniform_noise(objective, parametrisation, first, x64):
    process = Uniform(2, parametrisation=parametrisation)
    denoiser = after(lambda p: exact.uniform_outputs(process, p), P)
    found = exact.uniform_integral(Prompted(objective, first), denoiser, process, REST)
    np.testing.assert_allclose(found, -np.log(conditional(P, first)).ravel(), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_the_rest_on_hybrid_noise(first, x64):
    process = Hybrid(2, 0.3)
    denoiser = after(lambda p: interpolating.perfect(process, p), P)
    found = interpolating.integral(Prompted(GIDD(), first), denoiser, process, REST)
    np.testing.assert_allclose(found, -np.log(conditional(P, first)).ravel(), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("passes", ["two", "one_weighted"])
@pytest.mark.parametrize("kernel", ["uniform", "absorbing"])
@pytest.mark.cases(2)
def test_the_rest_in_continuous_time(kernel, passes, x64):
    """Jumps are of the tokens that count, and the rates of leaving those of them alone."""
    process = Rates(2, kernel=kernel)
    denoiser = after(lambda p: chains.exact_denoiser(process, p), P)
    for first in range(2):
        objective = Prompted(CTMC(passes, 0.0), first)
        found = chains.bound(objective, denoiser, process, REST, nodes=80)
        np.testing.assert_allclose(found, -np.log(conditional(P, first)).ravel(), rtol=1e-7)


@pytest.mark.parametrize("mask", [(0, 1, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1), (1, 1, 0, 0)])
@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.cases(2)
def test_blocks_of_which_a_part_counts(block, mask, x64):
    """-log p(counted tokens | those before and the others of their block), by enumeration.

    With the perfect denoiser a block costs -log p(counted | clean blocks before, uncounted of
    the block): what comes later is not seen.
    """
    p = np.random.default_rng(0).dirichlet(np.ones(16)).reshape(2, 2, 2, 2)
    counts, x = np.array(mask, bool), exact.sequences(2, 4)
    groups = counts.reshape(-1, block)
    found = np.zeros(16)
    denoiser, objective = exact.block_table(exact.perfect_logits(p)), BlockDiffusion(block)
    batch = batch_of(x, loss_mask=np.broadcast_to(counts, x.shape))
    shapes = [
        [m for m in exact.patterns(block) if not (m & ~group).any() and m.any() == group.any()]
        for group in groups
    ]
    for masks in itertools.product(*shapes):
        law = 1.0
        for m, group in zip(masks, groups, strict=True):
            if n := int(group.sum()):
                law /= n * math.comb(n, int(m.sum()))
        z = jnp.asarray(np.where(np.concatenate(masks), 2, x))
        noise = jnp.full((16, 4 // block), 0.5)
        found += law * np.asarray(objective.loss_at(denoiser, Masking(2), batch, z, noise))
    expected = np.zeros(16)
    for b in range(4 // block):
        seen = np.arange(4) < b * block
        own = (np.arange(4) // block == b) & ~counts
        expected -= np.log(marginal(p, x, np.arange(4) < (b + 1) * block))
        expected += np.log(marginal(p, x, seen | own))
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)


def marginal(p: np.ndarray, x: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The probability of x at these positions, for each row."""
    sums = p.sum(axis=tuple(np.flatnonzero(~where)), keepdims=True)
    return np.broadcast_to(sums, p.shape)[tuple(x.T)]


POWER = jnp.log(jnp.expm1(jnp.array([0.8, 1.5])))
POINTWISE = {
    "genmd4": (GenMD4(0.05), lambda: StateDependent(2, raw_power=POWER)),
    "denoising": (ConcreteScore("denoising"), lambda: Uniform(2)),
    "cross_entropy": (CrossEntropy(), lambda: Uniform(2, parametrisation="mixture")),
    "one": (CTMC("one", 0.1), lambda: Rates(2)),
    "gidd": (GIDD(), lambda: Hybrid(2, 0.3)),
    "md4": (MD4(), lambda: Masking(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.cases(2)
def test_at_each_state_a_prompt_leaves_the_objective_of_the_rest(name, x64):
    """Any denoiser: as the rest alone with what the denoiser says of it after that prompt."""
    objective, make = POINTWISE[name]
    process = make()
    symbols = 3 if process.shows_clean else 2
    table = exact.denoiser_of(exact.table_logits(2, 3), time=0.7)
    z = jnp.asarray(exact.sequences(symbols, 2))
    t, rest = jnp.linspace(0.1, 0.9, len(z)), exact.batch_of(np.tile([[1, 0]], (len(z), 1)))
    if process.shows_clean:
        keep = np.asarray(((z == 2) | (z == rest.tokens)).all(axis=1))
        z, t, rest = z[keep], t[keep], exact.batch_of(rest.tokens[keep])
    for first in range(2):
        told = Prompted(objective, first)
        alone = exact.of_outputs(lambda z, t, told=told: table.features(told._whole(z), t)[:, 1:])
        found = told.loss_at(table, process, rest, z, t)
        np.testing.assert_allclose(found, objective.loss_at(alone, process, rest, z, t), rtol=1e-12)
        if hasattr(objective, "reconstruction"):
            ends = (told.reconstruction(process, rest), objective.reconstruction(process, rest))
            np.testing.assert_allclose(*ends, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_the_neighbours_of_concrete_score_matching_differ_in_what_counts(first, x64):
    """J at every move of the rest is that of the rest alone; drawn moves never touch a prompt."""
    objective, process = ConcreteScore(), Uniform(2)
    table = exact.denoiser_of(exact.table_logits(2, 3), time=0.7)
    told, t = Prompted(objective, first), jnp.full(4, 0.4)
    alone = exact.of_outputs(lambda z, t: table.features(told._whole(z), t)[:, 1:])
    rest, z = exact.batch_of(REST), jnp.asarray(REST)
    for where in range(2):
        place, symbol = jnp.full(4, where), 1 - z[:, where]
        whole = told._batch(rest), told._whole(z), t
        found = objective.loss_at_move(table, process, *whole, (place + 1, symbol))
        expected = objective.loss_at_move(alone, process, rest, z, t, (place, symbol))
        np.testing.assert_allclose(found, expected, rtol=1e-12)


DRAWN = {
    "md4": (MD4(), Masking(2)),
    "md4, cosine": (MD4(), Masking(2, Cosine())),
    "lambda_dce": (LambdaDCE(), Masking(2)),
    "any_order": (AnyOrder(), Masking(2)),
    "block": (BlockDiffusion(3), Masking(2)),
    "block, times": (BlockDiffusion(3, "times"), Masking(2)),
    "uniform_elbo": (UniformELBO(), Uniform(2)),
    "ctmc": (CTMC(), Rates(2)),
    "ctmc, absorbing": (CTMC("two"), Rates(2, kernel="absorbing")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.cases(1)
def test_the_mean_of_the_draws_after_a_prompt(name):
    """n = 40,000 strata, x = (1, 0, 1) given its first token: within 4.5 standard errors."""
    objective, process = DRAWN[name]
    n = 40_000
    make = {
        Uniform: lambda p: exact.uniform_outputs(process, p),
        Rates: lambda p: chains.exact_denoiser(process, p),
    }.get(type(process), perfect())
    tokens = np.tile([[1, 0, 1]], (n, 1)).astype(np.int32)
    batch = batch_of(tokens, loss_mask=np.tile([False, True, True], (n, 1)))
    u = (jnp.arange(n) + 0.5) / n
    arguments = after(make, P), process, batch, u, exact.keys_for(2, n)
    nats = np.asarray(jax.jit(lambda: objective(*arguments)[0])(), np.float64)
    error = nats.std() / math.sqrt(n)
    expected = -math.log(conditional(P, 1)[0, 1])
    assert abs(nats.mean() - expected) < 4.5 * error + 2e-4, (nats.mean(), expected, error)
    assert error < 0.06 * expected  # so that the test says something
