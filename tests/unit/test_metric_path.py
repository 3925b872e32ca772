"""Noise by distances: its law, its bound and its steps, against sums over all symbols in numpy."""

import json

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wrong_denoiser import wrong_outputs

from md4_jax.config.schema import build_section, load_config
from md4_jax.objectives.generalized_kl import GeneralizedKL
from md4_jax.processes.metric_path import MetricPath, distances_of, lost_nats
from md4_jax.protocols import Denoiser, UserError
from md4_jax.samplers.flow import Flow

ALL = exact.sequences(3, 2)
TABLE = (0.0, 2.0, 1.0, 3.0, 0.0, 1.5, 0.5, 1.0, 0.0)  # not symmetric
CASES = {
    "ordered": MetricPath(3),
    "squares": MetricPath(3, power=2.0, exponent=2.0),
    "table": MetricPath(3, table=TABLE, scale=1.0),
    "mixture": MetricPath(3, offset=0.01, parametrisation="mixture"),
}
every_case = pytest.mark.parametrize("process", CASES.values(), ids=CASES)
in_float64 = pytest.mark.usefixtures("x64")


def distances(process) -> np.ndarray:
    """d[z, x], from the words of the page."""
    size = process.vocab_size
    base = np.reshape(process.table, (size, size)) if process.table else None
    if base is None:
        base = np.array([[abs(z - x) for x in range(size)] for z in range(size)], float)
    base = base**process.power
    return base / base[~np.eye(size, dtype=bool)].mean()


def beta(process, t: float) -> float:
    return process.scale * ((1.0 - t) / (t + process.offset)) ** process.exponent


def law(process, t: float) -> np.ndarray:
    """q(z | x) as [z, x]."""
    weights = np.exp(-beta(process, t) * distances(process))
    return weights / weights.sum(axis=0)


def unit_rates(process, t: float) -> np.ndarray:
    """The jumps of z to y given x, without -beta', as [z, y, x]."""
    d = distances(process)
    return law(process, t)[None] * np.maximum(d[:, None] - d[None], 0.0)


def kernel(process, s: float, t: float, *, frozen: bool = False) -> np.ndarray:
    """P(z_s = y | z_t = z, x) of a step as [z, y, x]: the first jump of constant rates."""
    size = process.vocab_size
    if s == 0.0:
        return np.broadcast_to(np.eye(size), (size, size, size))
    change = beta(process, s) - beta(process, t)
    if frozen:
        small = 1e-6
        change = (t - s) * (beta(process, t - small) - beta(process, t + small)) / (2.0 * small)
    rates = unit_rates(process, t)
    total = rates.sum(axis=1, keepdims=True)
    jumps = rates / np.where(total > 0, total, 1.0) * (1.0 - np.exp(-change * total))
    return jumps + np.eye(size)[:, :, None] * (1.0 - jumps.sum(axis=1, keepdims=True))


def right_outputs(process, p: np.ndarray) -> Denoiser:
    """What is exact for one token of the distribution p."""

    def features(z, t):
        prior = jnp.broadcast_to(jnp.log(p), (*z.shape, len(p)))
        if process.parametrisation == "joint":
            return prior
        d = jnp.asarray(distances(process))
        level = process.sharpness(t)[:, None, None]
        norm = jax.nn.logsumexp(-level * d.T, axis=-1)
        return prior - level * d[z] - norm[:, None]

    return Denoiser(features, lambda h: h)


def integral(denoiser, process, x: np.ndarray, nodes: int = 100) -> np.ndarray:
    """The mean of loss_at over t and z, by quadrature and enumeration: [X]."""
    t, weights = exact.quadrature(nodes=nodes, power=3)
    loss_at = exact.bind(GeneralizedKL(), denoiser, process)
    values = exact.over_states(loss_at, process.vocab_size, x, t)
    z = exact.sequences(process.vocab_size, x.shape[1])
    laws = np.stack([law(process, time) for time in t], axis=0)
    chance = np.prod(laws[:, z[:, None], x[None]], axis=-1)  # [N, Z, X]
    return np.einsum("xnz,nzx,n->x", values, chance, weights)


@in_float64
@every_case
def test_the_law_of_noise(process):
    for t in (1e-3, 0.2, 0.7, 1.0):
        found = process.marginal(jnp.array([t]))[0]
        np.testing.assert_allclose(found, law(process, t).T, rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(law(process, 1.0), 1 / 3)
    x = np.repeat(exact.sequences(3, 1), 60_000, axis=1)
    z = np.asarray(process.corrupt(exact.keys_for(0, 3), jnp.asarray(x), jnp.full(3, 0.6)))
    for symbol in range(3):
        found, right = np.bincount(z[symbol], minlength=3) / 60_000, law(process, 0.6)[:, symbol]
        assert (np.abs(found - right) < 4.5 * np.sqrt(right * (1.0 - right) / 60_000)).all()


@every_case
def test_the_rates_carry_the_law_of_noise(process):
    """dq/dt by differences, and by what jumps bring and take (the forward equation)."""
    for t in (0.1, 0.5, 0.9):
        small = 1e-6
        slope = (beta(process, t - small) - beta(process, t + small)) / (2.0 * small)
        rates, q = slope * unit_rates(process, t), law(process, t)
        flow = np.einsum("zx,zyx->yx", q, rates) - q * rates.sum(axis=1)
        found = (law(process, t - small) - law(process, t + small)) / (2.0 * small)
        np.testing.assert_allclose(flow, found, rtol=1e-6, atol=1e-8)


@in_float64
@every_case
def test_beta_and_its_slope(process):
    t = np.array([0.03, 0.4, 0.95])
    found = process.sharpness(jnp.asarray(t))
    np.testing.assert_allclose(found, [beta(process, time) for time in t], rtol=1e-12)
    differences = [(beta(process, a + 1e-6) - beta(process, a - 1e-6)) / 2e-6 for a in t]
    np.testing.assert_allclose(process.sharpness_slope(jnp.asarray(t)), differences, rtol=1e-6)


@pytest.mark.quick(1)
@in_float64
@every_case
@pytest.mark.cases(1)
def test_the_integrand_is_the_divergence_of_the_jumps(process):
    """By sums over x and y, for outputs that are wrong."""
    for t in (0.2, 0.4, 0.9):
        rates = unit_rates(process, t)
        slope = -float(process.sharpness_slope(jnp.asarray(t)))
        z, times = jnp.asarray(ALL), jnp.full(9, t)
        logits = process.clean_logits(wrong_outputs()(z, times), z, times)
        mu = np.asarray(jax.nn.softmax(logits, axis=-1))
        for x in ALL[[0, 5, 7]]:
            nats = np.zeros(9)
            for row, n in np.ndindex(9, 2):
                given = rates[ALL[row, n], :, x[n]]
                model = rates[ALL[row, n]] @ mu[row, n]
                ratio = np.where(given > 0, given, 1.0) / np.where(model > 0, model, 1.0)
                cost = model - given + np.where(given > 0, given * np.log(ratio), 0.0)
                nats[row] += slope * cost.sum()
            batch = exact.batch_of(np.tile(x, (9, 1)))
            found = GeneralizedKL().loss_at(wrong_outputs(), process, batch, z, times)
            np.testing.assert_allclose(found, nats, rtol=1e-7, atol=1e-9)


@in_float64
@pytest.mark.parametrize(
    "power, p, nats",
    [
        (1.0, (0.5, 0.3, 0.2), 1.27556),
        (2.0, (0.5, 0.3, 0.2), 1.29669),
        (1.0, (0.4, 0.1, 0.1, 0.15, 0.25), 1.78524),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, dict(exponent=2.0, scale=0.5), dict(offset=0.01, parametrisation="mixture")],
    ids=["plain", "another beta", "mixture"],
)
@pytest.mark.cases(5)
def test_right_outputs_have_the_divergence_of_the_paths(power, p, nats, options):
    """Above the entropy, 1.02965 and 1.45817, and the same for every beta."""
    p = np.array(p)
    process = MetricPath(len(p), power=power, **options)
    found = integral(right_outputs(process, p), process, exact.sequences(len(p), 1))
    assert p @ found == pytest.approx(nats, abs=1e-5)


@in_float64
@every_case
@pytest.mark.cases(2)
def test_no_text_is_less_likely_than_it_says(process):
    """The law of many steps of wrong outputs by enumeration, with a last draw, and the bound."""
    found, grid = np.full(9, 1 / 9), np.linspace(0.0, 1.0, 301) ** 3
    z = jnp.asarray(ALL)

    @jax.jit
    def posterior(t):
        times = jnp.full(9, t)
        outputs = wrong_outputs()(z, times)
        return jax.nn.softmax(process.clean_logits(outputs, z, times), axis=-1)

    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        steps = kernel(process, s, t) if s > 0 else np.eye(3)[None].repeat(3, axis=0)
        mu = np.asarray(posterior(t))
        step = np.einsum("znyx,znx->zny", steps[ALL], mu)
        found = found @ np.prod([step[:, n][:, ALL[:, n]] for n in range(2)], axis=0)
    assert found.sum() == pytest.approx(1.0)
    if process.parametrisation == "joint":
        values = integral(wrong_outputs(), process, ALL)
        assert (values > -np.log(found) + 0.005).all() and (values < 10.0).all()
    else:  # the bound's own last draw is worse than that of the outputs
        assert np.exp(-integral(wrong_outputs(), process, ALL)).sum() < 1.0


@in_float64
def test_it_is_a_bound_where_beta_ends():
    """With the cost of the decoder of z_0; without it, the mass of more than one model."""
    process, p = MetricPath(3, offset=0.7, scale=1.0), exact.P_V3L1
    values = integral(right_outputs(process, p), process, exact.sequences(3, 1))
    ends = np.asarray(process.reconstruction_nats(jnp.arange(3)))
    q = law(process, 0.0)
    by_hand = -(q * np.log(q / q.sum(axis=1, keepdims=True))).sum(axis=0)
    np.testing.assert_allclose(ends, by_hand, rtol=1e-9)
    assert np.exp(-values).sum() > 1.0 > np.exp(-values - ends).sum()
    _, parts = GeneralizedKL()(
        right_outputs(process, p), process, exact.batch_of([[0], [1], [2]]),
        jnp.full(3, 0.5), exact.keys_for(0, 3),
    )  # fmt: skip
    np.testing.assert_allclose(parts["reconstruction"], ends, rtol=1e-9)


# The rate of each process in an ordinary run; the other one is of campaigns.
RATES = dict(ordered="integrated", squares="frozen", table="integrated", mixture="frozen")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "process, rate",
    [
        pytest.param(
            CASES[name], rate, id=f"{name}, {rate}", marks=[pytest.mark.campaign] * (rate != own)
        )
        for name, own in RATES.items()
        for rate in ("integrated", "frozen")
    ],
)
@pytest.mark.cases(1)
def test_samples_have_the_law_of_the_steps(process, rate):
    grid, count = np.float32([0.0, 0.3, 0.6, 1.0]), 30_000
    right, z = np.full(9, 1 / 9), jnp.asarray(ALL)
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        times = jnp.full(9, t)
        logits = process.clean_logits(wrong_outputs()(z, times), z, times)
        mu, steps = (
            np.asarray(jax.nn.softmax(logits)),
            kernel(process, s, t, frozen=rate == "frozen"),
        )
        step = np.einsum("znyx,znx->zny", steps[ALL], mu)
        right = right @ np.prod([step[:, n][:, ALL[:, n]] for n in range(2)], axis=0)
    if process.offset:  # z_0 may hold noise, and is drawn once more
        logits = process.clean_logits(wrong_outputs()(z, jnp.zeros(9)), z, jnp.zeros(9))
        step = np.asarray(jax.nn.softmax(logits))
        right = right @ np.prod([step[:, n][:, ALL[:, n]] for n in range(2)], axis=0)
    found, _ = exact.drawn(wrong_outputs(), process, Flow(rate), grid, exact.keys_for(2, count))
    found = np.bincount(np.asarray(found) @ [3, 1], minlength=9) / count
    assert (np.abs(found - right) < 4.5 * np.sqrt(right * (1.0 - right) / count)).all()


def test_small_steps_of_the_right_posterior_lead_to_the_data():
    """The error falls with the steps: by enumeration of one token."""
    process, p, gaps = MetricPath(3, exponent=2.0), exact.P_V3L1, []
    for count in (50, 200):
        grid, found = np.linspace(0.0, 1.0, count + 1), np.full(3, 1 / 3)
        for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
            mu = law(process, t) * p
            mu /= mu.sum(axis=1, keepdims=True)
            steps = kernel(process, s, t) if s > 0 else np.eye(3)[None].repeat(3, axis=0)
            found = found @ np.einsum("zyx,zx->zy", steps, mu)
        gaps.append(np.abs(found - p).max())
    assert gaps[1] < 0.35 * gaps[0] and gaps[1] < 5e-3


@every_case
@pytest.mark.parametrize("u", [0.0, 1e-4, 0.5, 1.0 - 2.0**-24])
@pytest.mark.cases(2)
def test_slopes_are_finite_in_float32(process, u):
    def mean(outputs):
        denoiser = Denoiser(lambda z, t: outputs, lambda h: h)
        nats, _ = GeneralizedKL()(
            denoiser, process, exact.batch_of(ALL), jnp.full(9, u), exact.keys_for(3, 9)
        )
        return jnp.mean(nats)

    start = 30.0 * jnp.sin(jnp.arange(54.0)).reshape(9, 2, 3)
    value, slope = jax.value_and_grad(mean)(start)
    assert np.isfinite(value) and np.isfinite(slope).all() and value >= 0.0


def test_tables():
    ordered = tuple(float(abs(z - x)) for z in range(5) for x in range(5))
    right = MetricPath(5, power=2.0).distances
    np.testing.assert_allclose(MetricPath(5, power=2.0, table=ordered).distances, right)
    vectors = np.arange(5.0)[:, None] * np.array([[3.0, 4.0]])
    np.testing.assert_allclose(
        MetricPath(5, power=2.0, table=distances_of(vectors)).distances, right, rtol=1e-6
    )
    np.testing.assert_allclose(MetricPath(3, table=TABLE).distances[1, 0], 3.0 / 1.5)


def test_a_table_in_a_config():
    """As a run's config.json has it, a list; it is not printed."""
    distances = [0.0 if z == x else 1.0 + (z < x) for z in range(27) for x in range(27)]
    words = {"process.table": ",".join(map(str, distances))}
    section = json.loads(json.dumps(load_config("configs/flow_text8.py:metric", words)["process"]))
    process = build_section("process", section, vocab_size=27)
    assert process == MetricPath(27, table=tuple(distances)) != MetricPath(27)
    assert "table" not in repr(process) and hash(process) != hash(MetricPath(27))


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(power=0.0), "process.power must be positive, not 0.0"),
        (dict(scale=-1.0), "process.scale must be positive"),
        (dict(exponent=4.0), r"process.exponent must lie in \[0.25, 3\], not 4.0"),
        (dict(offset=1.0), r"process.offset must lie in \[0, 1\)"),
        (dict(parametrisation="score"), "process.parametrisation must be one of joint, mixture"),
        (dict(parametrisation="mixture"), "needs process.offset above 0"),
        (dict(table=(0.0, 1.0)), "process.table must have 9 numbers, .* not 2"),
        (dict(table=(0.0,) * 9), "process.table must be 0 between a symbol and itself"),
        (dict(vocab_size=5000), "at most 2048 symbols, not 5000"),
        (dict(vocab_size=256, power=2.0, exponent=0.35), "would lack about 2.3 nats per token"),
        (dict(vocab_size=256, exponent=0.25), "larger exponent or scale, or process.offset above"),
        (dict(scale=1e4, exponent=0.3), "1.1 nats from uniform.* a smaller scale"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(UserError, match=said):
        MetricPath(**{"vocab_size": 3} | options)


@pytest.mark.parametrize("scale, exponent", [(1.0, 0.25), (0.04, 0.3), (3.0, 1.0)])
def test_what_bounds_miss_at_both_ends(scale, exponent, monkeypatch):
    """Of two symbols, whose distance is 1: the entropy of the first z, and what the last lacks."""
    monkeypatch.setattr(MetricPath, "_check_ends", lambda self: None)
    early, late = lost_nats(MetricPath(2, scale=scale, exponent=exponent))
    first, last = (scale * ((1.0 - t) / t) ** exponent for t in (2.0**-24, 1.0 - 2.0**-24))
    entropies = [np.log1p(np.exp(-b)) + b * np.exp(-b) / (1.0 + np.exp(-b)) for b in (first, last)]
    np.testing.assert_allclose([early, late], [entropies[0], np.log(2) - entropies[1]], atol=1e-14)


def test_what_is_lost_is_added_with_an_offset():
    process = MetricPath(256, power=2.0, exponent=0.35, offset=1e-3)
    assert process.reconstruction_nats(jnp.array([128]))[0] > 3.0 and max(lost_nats(process)) < 1e-3
