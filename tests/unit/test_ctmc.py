"""tauLDR's bound by enumeration of states and jumps, with each way of passing the network."""

import chains
import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.ctmc import CTMC, predecessors
from md4_jax.objectives.token_nats import rate_divergence, rate_excess
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import Cosine, Geometric, Polynomial
from md4_jax.protocols import Denoiser, UserError, batch_of

pytestmark = pytest.mark.slow

KERNELS = {
    "uniform": dict(),
    "absorbing": dict(kernel="absorbing"),
    "gaussian": dict(kernel="gaussian_symmetric", rate_width=1.0, stationary_width=0.4),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
both_forms = pytest.mark.parametrize("form", ["joint", "mixture"])
exact_passes = pytest.mark.parametrize("passes", ["two", "one_weighted"])
SINGLE = {"one": False, "one_weighted": True, "two": True, "score_entropy": True}
TABLE = exact.denoiser_of(exact.table_logits(3, 2), time=0.5)
T = float(-np.expm1(-0.6))  # sigma_bar = 0.6 with the linear schedule


@pytest.mark.parametrize("phase", [0.0, 1.0])
def test_s09_the_bound_without_its_constant_is_score_entropy_and_an_offset(phase, x64):
    """One token, x = 1, any positive score: A14's L_CT, summed by hand, minus the divergence."""
    process, z, t = Rates(3), jnp.arange(3)[:, None], jnp.full(3, T)
    score = np.exp(np.sin(phase + 1.7 * np.arange(9).reshape(3, 3)))
    # The entry at z itself is never read.
    ratio = process.score_given(z, jnp.ones((3, 1), int), t)
    entropy = rate_divergence(process.backward_rates(z), jnp.log(score)[:, None], ratio)[:, 0]
    law = chains.law_of(process, np.array([1]), [T])[0]
    rate = process.parts.generator
    pairs = [(x, y) for x in range(3) for y in range(3) if x != y]
    whole = sum(
        law[x] * (rate[y, x] * score[x, y] - rate[x, y] * np.log(rate[x, y] * score[y, x]))
        for x, y in pairs
    )
    assert whole - float(law @ entropy) == pytest.approx(0.83684466986, rel=1e-9)


@both_forms
@pytest.mark.parametrize("name", ["uniform", "gaussian"])
def test_one_pass_takes_its_first_term_after_a_jump_and_its_second_as_it_is(name, form, x64):
    """One token by hand: x = 1, all pairs of states, section 3.3's approximation and no other."""
    process = Rates(3, parametrisation=form, **KERNELS[name])
    table = exact.denoiser_of(exact.table_logits(3, 1), time=0.5)
    value = chains.integrand(CTMC("one", 0.0), table, process, np.array([[1]]), [T])[0, 0]
    law, rate = chains.law_of(process, np.array([1]), [T])[0], np.array(process.parts.generator)
    np.fill_diagonal(rate, 0.0)
    after = law @ (rate / rate.sum(axis=1, keepdims=True))
    z, t = jnp.arange(3)[:, None], jnp.full(3, T)
    score = np.exp(process.log_score(table(z, t), z, t))[:, 0]  # s_y at z: [z, y]
    ratio = law / law[:, None]
    first = np.sum(after[:, None] * rate.T * (score - ratio))
    second = np.sum(law[:, None] * rate * np.log(score / ratio).T)
    assert value == pytest.approx(float(process.beta(T)) * (first - second), rel=1e-9)


@both_forms
@every_kernel
@pytest.mark.cases(2)
def test_s09_all_exact_ways_have_the_mean_of_score_entropy(kernel, form, x64):
    """Two passes and one weighted pass, a wrong denoiser, 2 tokens; the entropy at z ~ q_t."""
    process, x, t = Rates(3, parametrisation=form, **kernel), np.array([1, 2]), [0.1, T, 0.97]
    values = {
        name: chains.integrand(CTMC(name, 0.0), TABLE, process, x[None], t)[0]
        for name in ("two", "one_weighted", "one")
    }
    law = chains.law_of(process, x, t)
    when, what = np.nonzero(law)
    z, times = jnp.asarray(chains.states(process, 2)[what]), jnp.asarray(t)[when]
    ratio = process.score_given(z, jnp.broadcast_to(x, z.shape), times)
    log_score = process.log_score(TABLE(z, times), z, times)
    each = rate_divergence(process.backward_rates(z), log_score, ratio).sum(axis=1)
    entropy, at_once = np.zeros(3), np.zeros(3)
    np.add.at(entropy, when, law[when, what] * np.asarray(process.beta(times) * each))
    batch = exact.batch_of(np.broadcast_to(x, z.shape))
    nats = CTMC("score_entropy", 0.0).loss_at(TABLE, process, batch, z, times)
    np.add.at(at_once, when, law[when, what] * np.asarray(nats))
    np.testing.assert_allclose(at_once, entropy, rtol=1e-9)
    np.testing.assert_allclose(values["two"], entropy, rtol=1e-9)
    np.testing.assert_allclose(values["one_weighted"], entropy, rtol=1e-9)
    if kernel is not KERNELS["absorbing"]:
        # psi instead of q_t is an approximation, and a visible one.
        assert (np.abs(values["one"] / entropy - 1.0) > 1e-3).all()


def test_t10_the_law_after_a_jump_and_the_reweighted_second_term(x64):
    process, x = Rates(2), np.array([0, 1])
    z = jnp.asarray(chains.states(process, 2))
    t, tokens = jnp.full(4, T), jnp.broadcast_to(x, z.shape)
    law, ratio = chains.law_of(process, x, [T])[0], process.score_given(z, tokens, t)
    psi = law * np.asarray(predecessors(process, ratio, z, exact.batch_of(tokens)))
    assert law[1] == pytest.approx(0.59970437103, rel=1e-9)
    assert psi[1] == pytest.approx(0.17470144702, rel=1e-9)
    assert psi.sum() == pytest.approx(1.0, rel=1e-12)
    # log Rhat of the identity stands for log(s / r), so that only the second term is left.
    code = np.arange(4)
    log_rate = np.sin(1 + 1.7 * code[:, None] + 0.9 * code)
    d = np.zeros((4, 2, 2))
    for i, state in enumerate(np.asarray(z)):
        for n in range(2):
            for y in range(2):
                there = np.array(state)
                there[n] = y
                d[i, n, y] = log_rate[i, there @ [2, 1]]
    rates = process.backward_rates(z)
    log_score = jnp.asarray(d) + jnp.log(ratio)
    second = rate_excess(rates, log_score, ratio) - rate_divergence(rates, log_score, ratio)
    share = 1.0 / predecessors(process, ratio, z, exact.batch_of(tokens))
    value = float(jnp.sum(psi * share * second.sum(axis=1)))
    assert value == pytest.approx(0.46507592503, rel=1e-9)


@exact_passes
@both_forms
@pytest.mark.parametrize(
    "shape, numbers",
    [
        ((3, 2), (2.3487522955, 2.260325825, 2.5537893656)),
        ((2, 3), (1.8263484685, 2.6368421674, 2.2885332526)),
    ],
)
@pytest.mark.cases(4)
def test_m06_absorption_is_md4(passes, form, shape, numbers, x64):
    """Also where all is masked and no jump is possible, whose share is 1 - t -> 0."""
    vocab, length = shape
    process = Rates(vocab, parametrisation=form, kernel="absorbing")
    denoiser = exact.denoiser_of(exact.table_logits(vocab, length))
    x = exact.sequences(vocab, length)
    value = chains.bound(CTMC(passes, 0.0), denoiser, process, x, nodes=16)
    data = (exact.P_V3L2 if vocab == 3 else exact.P_V2L3).ravel()
    np.testing.assert_allclose(value[[0, -1]], numbers[:2], rtol=1e-9)
    assert value @ data == pytest.approx(numbers[2], rel=1e-9)


@exact_passes
@both_forms
@pytest.mark.parametrize(
    "name, numbers",
    [
        ("uniform", (1.5238016903, 3.8224108792)),
        ("absorbing", (1.1749825411, 3.3629286726)),
    ],
)
@pytest.mark.cases(4)
def test_s06_a_part_of_the_integral_with_the_perfect_score(name, numbers, form, passes, x64):
    """sigma_bar from 0 to 1.5."""
    process = Rates(3, parametrisation=form, **KERNELS[name])
    denoiser = chains.exact_denoiser(process, exact.P_V3L2)
    t, weight = exact.quadrature(0.0, -np.expm1(-1.5), nodes=60, power=3)
    mean = chains.integrand(CTMC(passes, 0.0), denoiser, process, np.array([[0, 0], [1, 0]]), t)
    np.testing.assert_allclose(mean @ weight, numbers, rtol=2e-9)


@exact_passes
@every_kernel
@both_forms
@pytest.mark.cases(2)
def test_the_perfect_denoiser_reaches_the_data(kernel, form, passes, x64):
    """-log 0.2 and -log 0.02 of P_V3L2, for every kernel."""
    process = Rates(3, parametrisation=form, **kernel)
    denoiser = chains.exact_denoiser(process, exact.P_V3L2)
    x = np.array([[0, 0], [1, 0]])
    value = chains.bound(CTMC(passes, 0.0), denoiser, process, x, nodes=80)
    np.testing.assert_allclose(value, [1.6094379124, 3.9120230054], rtol=1e-7)


@pytest.mark.parametrize("schedule", [Cosine(), Polynomial(2.0)])
def test_the_bound_does_not_depend_on_the_schedule(schedule, x64):
    process = Rates(3, schedule)
    denoiser = chains.exact_denoiser(process, exact.P_V3L2)
    value = chains.bound(CTMC("one_weighted", 0.0), denoiser, process, np.array([[1, 0]]), nodes=80)
    np.testing.assert_allclose(value, 3.9120230054, rtol=1e-6)


@pytest.mark.parametrize("name", ["uniform", "gaussian"])
@pytest.mark.parametrize("schedule, first", [(None, 0.05), (Geometric(0.02, 3.0), 0.0)])
def test_both_ends_make_a_bound_where_time_is_cut_short(name, schedule, first, x64):
    """Above -log p by little; sum_x exp(-bound) <= 1 and not by much."""
    schedules = {} if schedule is None else {"schedule": schedule}
    process, p = Rates(3, **schedules, **KERNELS[name]), exact.P_V3L2
    denoiser = chains.exact_denoiser(process, p)
    objective, x = CTMC("one_weighted", first), exact.sequences(3, 2)
    value = chains.bound(objective, denoiser, process, x, nodes=24)
    gap = value + np.log(p).ravel()
    assert 0.002 < p.ravel() @ gap < 0.35 and 0.6 < np.exp(-value).sum() < 1.0
    ends = objective.ends(process, exact.batch_of(x))
    assert (ends["reconstruction"] > 0).all()
    assert (ends["prior"] > 0).all() == (schedule is not None)
    # Without the ends it would claim more than the data hold.
    assert (np.exp(-value + np.asarray(sum(ends.values())))).sum() > 1.0


@pytest.mark.parametrize(
    "passes", ["two", "one", pytest.param("one_weighted", marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize("form, dtype", [("joint", jnp.float32), ("mixture", jnp.bfloat16)])
@pytest.mark.cases(1)
def test_float32_values_and_gradients_are_finite_at_the_ends(passes, form, dtype):
    rows = 6
    x = np.random.default_rng(0).integers(0, 9, (rows, 5))
    batch, keys = exact.batch_of(x), exact.keys_for(4, rows)
    for kernel in KERNELS.values():
        process = Rates(9, parametrisation=form, **kernel)

        @jax.jit
        def value_and_gradient(outputs, u, process=process):
            def loss(outputs):
                denoiser = Denoiser(
                    lambda z, t: jnp.broadcast_to(outputs, (*z.shape, 9)).astype(dtype),
                    lambda h: h,
                )
                nats, extra = CTMC(passes)(denoiser, process, batch, u, keys)
                return nats.sum(), (nats, extra)

            return jax.value_and_grad(loss, has_aux=True)(outputs)

        outputs = 3.0 * jnp.sin(jnp.arange(9.0))
        for u in (0.0, 0.3, 1.0 - 2.0**-24):
            (_, (nats, extra)), gradient = value_and_gradient(outputs, jnp.full(rows, u))
            assert nats.dtype == jnp.float32 and jnp.isfinite(nats).all()
            assert jnp.isfinite(gradient).all()
            assert set(extra) == {"reconstruction", "prior", "changed"}


def test_the_draws_of_two_passes_vanish_with_what_is_left_of_x():
    """beta = 1 / (1 - t) meets terms of the size of 1 - t in each draw, not in the mean alone."""
    process, objective = Rates(3), CTMC("two")
    batch, keys = exact.batch_of(np.tile([[1, 2]], (512, 1))), exact.keys_for(0, 512)
    call = jax.jit(lambda u: objective(TABLE, process, batch, u, keys)[0])
    sizes = [np.abs(call(jnp.full(512, 1 - left))).max() for left in (1e-2, 1e-4, 1e-6)]
    assert 1.0 < sizes[0] < 20.0 and max(sizes) < 1.1 * sizes[0]


def test_a_time_that_rounds_to_one_keeps_its_cell():
    """first_time = 0.5 and the largest u give t = 1 in float32, where beta is infinite."""
    process, batch = Rates(3, kernel="absorbing"), exact.batch_of(np.tile([[1, 2]], (4, 1)))
    seen = []

    def features(z, t):
        seen.append(t)
        return TABLE.features(z, t)

    u, denoiser = jnp.full(4, 1.0 - 2.0**-24), Denoiser(features, lambda h: h)
    nats, _ = CTMC("two", 0.5)(denoiser, process, batch, u, exact.keys_for(0, 4))
    assert jnp.isfinite(nats).all() and (seen[0] == 1.0 - 2.0**-24).all()


@pytest.mark.parametrize("passes", ["two", "one"])
def test_rows_are_apart_and_the_context_is_repeated(passes):
    """The default is covered by the tests over the registry."""
    process, x = Rates(3), np.array([[0, 1], [2, 2], [1, 0]])
    seen = []

    def bound(segments):
        def features(z, t):
            seen.append(jnp.broadcast_to(segments, z.shape))
            return TABLE.features(z, t) + 0.1 * segments[..., None]

        rebind = lambda count: bound(jnp.repeat(segments, count, axis=0))  # noqa: E731
        return Denoiser(features, lambda h: h * h, rebind=rebind)

    u, keys = jnp.array([0.1, 0.5, 0.9]), exact.keys_for(7, 3)
    segments = jnp.arange(6).reshape(3, 2)
    call = jax.jit(lambda segments, *rest: CTMC(passes)(bound(segments), process, *rest)[0])
    whole = call(segments, exact.batch_of(x), u, keys)
    rows = np.array([2, 0])
    some = call(segments[rows], exact.batch_of(x[rows]), u[rows], keys[rows])
    np.testing.assert_allclose(some, whole[rows], rtol=1e-6)
    assert len(seen[0]) == (6 if passes == "two" else 3)


@pytest.mark.parametrize("passes", ["one", "two", "score_entropy"])
@pytest.mark.cases(1)
def test_the_cross_entropy_of_tauldr_is_a_mean_over_tokens(passes):
    """Of 5 tokens, two of which do not count, with the law (3, 1, 1) / 5 everywhere."""
    process = Rates(3, parametrisation="mixture")
    outputs = jnp.log(jnp.asarray([3.0, 1.0, 1.0]))
    denoiser = Denoiser(lambda z, t: jnp.broadcast_to(outputs, (*z.shape, 3)), lambda h: h)
    batch = batch_of(np.array([[0, 1, 0, 2, 2]]), loss_mask=np.array([[1, 1, 1, 0, 0]], bool))
    args = denoiser, process, batch, jnp.full(1, 0.4), exact.keys_for(0, 1)
    plain, more = (CTMC(passes, cross_entropy=weight)(*args)[0] for weight in (0.0, 2.0))
    want = 2.0 * (2 * np.log(5 / 3) + np.log(5)) / 3
    np.testing.assert_allclose(more - plain, want, rtol=1e-5)
    assert not CTMC("two", cross_entropy=0.1).is_bound(process)
    with pytest.raises(UserError, match="cross_entropy=0.1 needs process.parametrisation='mixture"):
        CTMC(cross_entropy=0.1).check(Rates(3))
    for fine in (process, Rates(3, kernel="absorbing")):
        CTMC(cross_entropy=0.1).check(fine)


def test_only_the_unweighted_single_pass_is_no_bound():
    assert {name: CTMC(name).is_bound(Rates(3)) for name in SINGLE} == SINGLE


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(passes="three"), "objective.passes must be one of one_weighted, .* not 'three'"),
        (dict(first_time=1.0), r"objective.first_time must lie in \[0, 1\), not 1.0"),
        (dict(first_time=-0.1), "not -0.1"),
        (dict(cross_entropy=-1.0), "objective.cross_entropy must not be negative, not -1.0"),
    ],
)
def test_impossible_objectives_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        CTMC(**settings)


def test_early_times_are_drawn_without_a_jump_alone():
    """After a jump they make rare weights larger: intervals of 95% held the bound in 76%."""
    assert CTMC(passes="score_entropy").time_power == 5
    assert [CTMC(passes=p).time_power for p in ("one_weighted", "two")] == [1, 1]
