"""Partial masking: the bound by enumeration, the published loss below the entropy, and samples."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sub_tokens

from md4_jax.objectives.prime import Prime, sub_token_nats
from md4_jax.objectives.radd import LambdaDCE
from md4_jax.processes.masking import Masking
from md4_jax.processes.partial_masking import PartialMasking
from md4_jax.processes.schedules import Cosine, Geometric
from md4_jax.protocols import Denoiser, Prompt, UserError
from md4_jax.protocols.sub_tokens import base_of, joined_code, split_code
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.loop import no_prompt, sample
from md4_jax.samplers.transforms import Transform

P = exact.P_V3L2
ENTROPY = -float(np.sum(P * np.log(P)))
PROCESSES = {
    "two": PartialMasking(3),
    "two, shuffled, another schedule": PartialMasking(3, Cosine(), shuffle=4),
    "three": PartialMasking(3, parts=3),
}
every_process = pytest.mark.parametrize(
    "process",
    [
        pytest.param(process, id=name, marks=[pytest.mark.slow] * (name != "two"))
        for name, process in PROCESSES.items()
    ],
)


@every_process
def test_the_bound_of_the_exact_network_is_the_likelihood_of_each_text(process, x64):
    found = sub_tokens.integral(Prime(), process, sub_tokens.posterior(process, P), 2)
    np.testing.assert_allclose(found, -np.log(P.ravel()), rtol=1e-9)


def test_a_wrong_network_has_no_more_than_one_of_probability(x64):
    process = PROCESSES["two"]
    found = sub_tokens.integral(Prime(), process, sub_tokens.posterior(process, P, 0.3), 2)
    assert 0.9 < np.exp(-found).sum() < 1.0 - 1e-4 and P.ravel() @ found > ENTROPY + 1e-3


@every_process
def test_the_published_loss_lies_below_the_entropy(process, x64):
    """1.8389 of 1.9934 nats, so that its exp(-L) are no probabilities; but no less than a part."""
    denoiser = sub_tokens.posterior(process, P)
    found = sub_tokens.integral(Prime("joint"), process, denoiser, 2)
    if process.shuffle == 0:
        assert P.ravel() @ found == pytest.approx(1.8388697802, abs=1e-9)
    assert ENTROPY / process.parts < P.ravel() @ found < ENTROPY - 0.1
    assert np.exp(-found).sum() > 1.1


def test_of_two_tokens_that_differ_everywhere_it_is_one_part_of_the_entropy(x64):
    """000 and 111 in base 2: any one sub-token tells which, and the network is asked on thirds."""
    process, p = PartialMasking(8, parts=3), np.full(8, 1e-12)
    p[[0, 7]] = 0.5
    joint, bound = (
        p @ sub_tokens.integral(form, process, sub_tokens.posterior(process, p), 1)
        for form in (Prime("joint"), Prime())
    )
    assert bound == pytest.approx(np.log(2.0), abs=1e-9)
    assert joint == pytest.approx(np.log(2.0) / 3, abs=1e-9)


def test_with_one_part_it_is_that_of_masks():
    """The same masks from the same keys, and the same loss, in either form."""
    process, plain = PartialMasking(3, Cosine(), parts=1), Masking(3, Cosine())
    denoiser = exact.denoiser_of(exact.table_logits(3, 2), time=0.4)
    batch, u = exact.batch_of(exact.sequences(3, 2)), (jnp.arange(9) + 0.5) / 9
    keys = exact.keys_for(0, 9)
    expected = LambdaDCE()(denoiser, plain, batch, u, keys)[0]
    for form in ("bound", "joint"):
        found, extra = Prime(form)(denoiser, process, batch, u, keys)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_array_equal(extra["masked"], extra["hidden"])
    assert expected.max() > 0.5


def test_the_mean_of_the_draws(x64):
    """n = 20,000 for each of three texts: within 4.5 standard errors of the integral."""
    process, n = PROCESSES["two"], 20_000
    denoiser = sub_tokens.posterior(process, P, 0.5)
    expected = sub_tokens.integral(Prime(), process, denoiser, 2)
    draw = jax.jit(lambda batch, u, keys: Prime()(denoiser, process, batch, u, keys)[0])
    for number in (0, 5, 7):
        batch = exact.batch_of(np.tile(exact.sequences(3, 2)[number], (n, 1)))
        nats = np.asarray(draw(batch, (jnp.arange(n) + 0.5) / n, exact.keys_for(number, n)))
        error = nats.std() / np.sqrt(n)
        assert abs(nats.mean() - expected[number]) < 4.5 * error < 0.1 * expected[number]


def marginals(logits, x, hidden, digits):
    """By hand, in float64: (sum over hidden sub-tokens, joint) of one token."""
    fits = [all(h or d == own for h, d, own in zip(hidden, row, digits[x], strict=True))
            for row in digits]  # fmt: skip
    mu = np.exp(np.asarray(logits, np.float64)) * fits
    mu /= mu.sum()
    parts = [-np.log(mu[digits[:, j] == digits[x, j]].sum()) for j in np.flatnonzero(hidden)]
    return sum(parts), -np.log(mu[x]) * any(hidden)


@pytest.mark.parametrize("shuffle", [0, 3])
def test_the_costs_of_sub_tokens(shuffle):
    """Also their gradient, and that the joint cost times their number is never less."""
    digits, rng = PartialMasking(7, parts=3, shuffle=shuffle).digits, np.random.RandomState(1)
    logits, x = jnp.asarray(2 * rng.randn(20, 7), jnp.float32), rng.randint(7, size=20)
    hidden = rng.rand(20, 3) < 0.6
    expected = np.array([marginals(*row, digits) for row in zip(logits, x, hidden, strict=True)])
    found = [sub_token_nats(logits, jnp.asarray(x), hidden, digits, joint) for joint in (0, 1)]
    np.testing.assert_allclose(np.stack(found, 1), expected, rtol=2e-5, atol=2e-6)
    assert (found[1] * hidden.sum(axis=1) > np.asarray(found[0]) - 1e-5).all()
    for column, joint in enumerate((False, True)):
        loss = lambda v, j=joint: sub_token_nats(v, jnp.asarray(x), hidden, digits, j).sum()  # noqa: E731
        slope, step = np.asarray(jax.grad(loss)(logits), np.float64), 1e-5
        for row, k in ((0, 2), (3, int(x[3])), (7, 0), (11, 6)):
            moved = np.asarray(logits, np.float64)[row] + step * np.eye(7)[k] * [[1], [-1]]
            up, down = (marginals(v, x[row], hidden[row], digits)[column] for v in moved)
            assert slope[row, k] == pytest.approx((up - down) / (2 * step), abs=1e-5)


def test_costs_of_hopeless_predictions_are_finite():
    """Where all the tokens with the right sub-token have probability exp(-500)."""
    digits = PartialMasking(4).digits
    logits, hidden = jnp.array([[0.0, 0.0, -500.0, -500.0]]), jnp.ones((1, 2), bool)
    loss = lambda v: sub_token_nats(v, jnp.array([3]), hidden, digits).sum()  # noqa: E731
    value, slope = jax.value_and_grad(loss)(logits)
    assert value == pytest.approx(500.0 + np.log(2.0), rel=1e-6)
    np.testing.assert_allclose(slope, [[1.0, 0.0, -0.5, -0.5]], atol=1e-6)


def test_bases():
    """The smallest in which all symbols can be written, as GPT-2's 50,257."""
    sizes = [base_of(50_257, parts) for parts in (1, 2, 3, 4, 6, 8, 16)]
    assert sizes == [50_257, 225, 37, 15, 7, 4, 2]
    assert [base_of(n, 3) for n in (2, 8, 9, 27, 28, 4913, 4914)] == [2, 2, 3, 3, 4, 17, 18]
    code = jnp.arange(4**3)
    np.testing.assert_array_equal(joined_code(split_code(code, 3, 3), 3), code)


def test_symbols_and_their_sub_tokens():
    process = PartialMasking(5, parts=2)  # in base 3: 00 01 02 10 11
    np.testing.assert_array_equal(process.digits, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]])
    x, hidden = jnp.array([4, 4, 4, 4]), jnp.array([[0, 0], [0, 1], [1, 0], [1, 1]], bool)
    z = process.hide(x, hidden)
    np.testing.assert_array_equal(z, [4, 5 + 4 * 2, 5 + 2, 5])
    np.testing.assert_array_equal(process.hidden(z), hidden)
    np.testing.assert_array_equal(process.code(z), [4 * 2 + 2, 4 * 2, 2, 0])
    possible = [[0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 1, 0, 0, 1], [1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(process.possible(z), np.array(possible, bool))
    np.testing.assert_array_equal(process.is_noise(z), [False, True, True, True])
    assert process.states == 5 + 16 and process.mask_id == 5


def test_every_symbol_agrees_with_its_tokens():
    process = PartialMasking(6, parts=3, shuffle=2)
    known = sorted(sub_tokens.symbols_of(process))
    expected = sub_tokens.agreeing(process)[known]
    np.testing.assert_array_equal(process.possible(jnp.asarray(known)), expected)


def test_tokens_are_shuffled_by_the_seed():
    plain, first, again, second = (
        PartialMasking(100, parts=7, shuffle=seed).digits for seed in (0, 1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != second).any() and (first != plain).any()
    number = first @ 2 ** np.arange(6, -1, -1)
    np.testing.assert_array_equal(np.sort(number), np.arange(100))
    assert number[:4].tolist() == [80, 84, 33, 81]  # runs depend on it


def test_sub_tokens_are_hidden_independently():
    """Of 60,000 tokens at alpha = 0.7: each pattern as often as it should be, 4.5 errors."""
    process, rows = PartialMasking(30, parts=3), 3_000
    x = jnp.full((rows, 20), 17)
    z = process.corrupt(exact.keys_for(0, rows), x, jnp.full(rows, 0.3))
    pattern = np.asarray(process.hidden(z)).reshape(-1, 3) @ [1, 2, 4]
    expected = np.array([0.3 ** bin(k).count("1") * 0.7 ** (3 - bin(k).count("1"))
                         for k in range(8)])  # fmt: skip
    found = np.bincount(pattern, minlength=8) / len(pattern)
    error = np.sqrt(expected * (1 - expected) / len(pattern))
    assert (np.abs(found - expected) < 4.5 * error).all()
    assert (np.asarray(z)[~np.asarray(process.is_noise(z))] == 17).all()


GRID = np.array([0.0, 0.3, 0.8, 1.0], np.float32)


def wrong(process) -> Denoiser:
    """Outputs that depend on the symbols, the position and the time, of any process."""

    def outputs(z, t):
        whole = jnp.sum(z * jnp.array([1.0, 3.0]), axis=1)[:, None, None]
        place = jnp.arange(z.shape[1])[:, None]
        phase = 1.3 * whole + 2.9 * place + 1.7 * jnp.arange(process.vocab_size)
        return 1.5 * jnp.sin(phase + t[:, None, None])

    return Denoiser(outputs, lambda h: h)


@pytest.mark.parametrize("shuffle", [0, pytest.param(4, marks=pytest.mark.campaign)])
def test_samples_have_the_law_of_the_chain(shuffle):
    """Three steps of a wrong network, 40,000 samples: each text within 4.5 standard errors."""
    process, n = PartialMasking(3, shuffle=shuffle), 40_000
    denoiser = wrong(process)
    expected = sub_tokens.law(process, denoiser, GRID, 2)
    assert expected.sum() == pytest.approx(1.0)
    z, evaluations = exact.drawn(denoiser, process, Ancestral(), GRID, exact.keys_for(1, n))
    assert (np.asarray(evaluations) == 3).all()
    found = np.bincount(np.asarray(z) @ [3, 1], minlength=9) / n
    assert (np.abs(found - expected) < 4.5 * np.sqrt(expected * (1 - expected) / n)).all()
    # Not that of masked tokens, which are revealed as a whole.
    masked = sub_tokens.law(PartialMasking(3, parts=1), denoiser, GRID, 2)
    assert np.abs(masked - expected).max() > 0.02


def test_the_law_of_the_samples_tends_to_that_of_the_data(x64):
    """By enumeration with the exact network: the distance halves with twice the steps."""
    process = PROCESSES["two"]
    denoiser = sub_tokens.posterior(process, P)
    apart = [
        0.5 * np.abs(sub_tokens.law(process, denoiser, grid, 2) - P.ravel()).sum()
        for grid in (np.linspace(0.0, 1.0, steps + 1) for steps in (1, 8, 16))
    ]
    assert apart[0] == pytest.approx(0.255, rel=1e-6)  # the product of the marginals
    assert apart[1] < 0.05 and apart[2] == pytest.approx(apart[1] / 2, rel=0.1)


def drawn(process, transform=None, prompt=None, rows=200, length=3, outputs=None):
    """(chain, frames) of samples of a network that knows nothing."""
    flat = outputs or (lambda z, t: jnp.zeros((*z.shape, process.vocab_size)))
    return sample(
        Denoiser(flat, lambda h: h), process, Ancestral(transform or Transform()),
        grid=np.linspace(0.0, 1.0, 5, dtype=np.float32), keys=exact.keys_for(0, rows),
        prompt=prompt or no_prompt(rows, length), trace=rows,
    )  # fmt: skip


def test_what_is_visible_stays_and_paths_show_masks():
    process = PartialMasking(5, parts=2)
    chain, frames = drawn(process)
    z = np.asarray(frames.z)
    assert (z[-1] < 5).all() and (z[0] == 5).all() and z.max() == 5
    assert ((z[1:] == z[:-1]) | (z[:-1] == 5)).all()
    # The first sub-token of a token is often visible before the second: 1 of 3 or of 2 then.
    each = np.unique(np.round(np.asarray(chain.confidence), 4))
    np.testing.assert_allclose(each, [0.2, 1 / 3, 0.5, 1.0], atol=1e-4)


def test_top_p_keeps_tokens_that_agree():
    """Almost all the probability is of token 0, which a visible sub-token may exclude."""
    process = PartialMasking(4)
    outputs = lambda z, t: jnp.where(jnp.arange(4) == 0, 6.0, 0.0) + 0.0 * z[..., None]  # noqa: E731
    start = jnp.full((50, 2), 4 + 2 * 3)  # the first sub-token is 1: tokens 2 and 3
    chain = exact.chain_of(start)
    step = Ancestral(Transform(top_p=0.5))
    after = step(Denoiser(outputs, lambda h: h), process, chain, 0.0, 1.0, exact.keys_for(0, 50))
    assert set(np.unique(after.z).tolist()) <= {2, 3}


def test_a_prompt_stays_and_is_seen_clean():
    seen, process = [], PartialMasking(5)
    prompt = Prompt(np.full((6, 3), 4, np.int32), np.tile([True, False, False], (6, 1)))

    def outputs(z, t):
        jax.debug.callback(lambda z: seen.append(np.asarray(z)), z)
        return jnp.zeros((*z.shape, 5))

    chain, _ = drawn(process, prompt=prompt, rows=6, outputs=outputs)
    jax.effects_barrier()
    assert len(seen) == 4 and all((z[:, 0] == 4).all() for z in seen)
    assert (np.asarray(chain.z)[:, 0] == 4).all()


def test_what_the_schedule_leaves_hidden_is_drawn_at_the_end():
    """alpha_0 = 0.6: one more evaluation for texts with hidden sub-tokens."""
    process = PartialMasking(3, Geometric(0.5, 9.0))
    grid = np.array([0.0, 1.0], np.float32)
    z, evaluations = exact.drawn(wrong(process), process, Ancestral(), grid, exact.keys_for(0, 200))
    assert (np.asarray(z) < 3).all() and set(np.asarray(evaluations).tolist()) == {1, 2}
    assert Prime().is_bound(process) and not Prime("joint").is_bound(process)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Prime("both"), "objective.form must be 'bound' or 'joint', not 'both'"),
        (lambda: PartialMasking(3, parts=0), "process.parts must be at least 1, not 0"),
        (lambda: PartialMasking(3, parts=20), "3\\^20 partly masked symbols .* reduce process.par"),
        (lambda: PartialMasking(3, shuffle=-1), "process.shuffle must not be negative, not -1"),
        (lambda: PartialMasking(3, conditioning="never"), "process.conditioning must be one of"),
    ],
)
def test_impossible_options_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
