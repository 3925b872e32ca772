"""Discrete flow matching: numbers of the library flow_matching (arXiv:2412.06264) beside ours.

Its folder, torch and torchdiffeq on the path, this printed the losses and velocities below:

    import itertools, torch
    from flow_matching.loss import MixturePathGeneralizedKL
    from flow_matching.path import MixtureDiscreteProbPath
    from flow_matching.path.scheduler import PolynomialConvexScheduler
    torch.set_default_dtype(torch.float64)
    logits = torch.tensor(LOGITS); x_1 = torch.tensor([[2, 0, 1]])
    masks = logits.clone(); masks[:, 3] = -torch.inf
    for n, t in itertools.product((1.0, 2.0), (0.1, 0.5, 0.9)):
        path = MixtureDiscreteProbPath(PolynomialConvexScheduler(n=n))
        loss, time = MixturePathGeneralizedKL(path, reduction="none"), torch.tensor([t])
        for out, x_t in [(masks, [3, 3, 3]), (masks, [3, 0, 3]), (logits, [3, 0, 3]),
                         (logits[:, :3], [2, 1, 0])]:
            print(loss(out[None], x_1, torch.tensor([x_t]), time))
        print(path.posterior_to_velocity(logits[None, :, :3], torch.tensor([[2, 1, 0]]), time))
    print(torch.nn.CrossEntropyLoss()(logits[:, :3], x_1[0]))

and this the frequencies of its step, of 4 million draws, for a model that says softmax(out)
always, from z, with c = 0, or c = 1 and all of the source's weight on the mask:

    from flow_matching.solver import MixtureDiscreteEulerSolver
    solver = MixtureDiscreteEulerSolver(model, path, len(out), source)
    solver.sample(torch.full((4_000_000, 1), z), None, time_grid=torch.tensor([0.5, 0.75, 1.0]),
                  return_intermediates=True, div_free=c)[1]
"""

import exact
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.cross_entropy import CrossEntropy
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.token_nats import masked_nats
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Linear, Power
from md4_jax.processes.uniform import Uniform
from md4_jax.samplers import reveal
from md4_jax.samplers.jumps import Euler, TauLeaping
from md4_jax.samplers.predictor_corrector import PredictorCorrector

LOGITS = np.array([[0.3, -0.7, 1.1, 0.2], [-0.4, 0.9, 0.5, -1.2], [0.8, 0.1, -0.6, 0.4]])
X, Z = np.array([[2, 0, 1]]), np.array([[2, 1, 0]])
SCHEDULES = {1: Linear(), 2: Power(2.0)}

# Losses of positions. No output for the mask, masks alone and with one token shown; an output for
# the mask; uniform noise. Keys are their n and t.
ALL_MASKED = {
    (1, 0.1): [0.532338331259, 2.18239657088, 1.39523592483],
    (1, 0.5): [0.958208996265, 3.92831382758, 2.51142466469],
    (1, 0.9): [4.79104498133, 19.6415691379, 12.5571233235],
    (2, 0.1): [0.0967887875016, 0.396799376524, 0.25367925906],
    (2, 0.5): [0.63880599751, 2.61887588506, 1.67428310979],
    (2, 0.9): [4.53888471915, 18.6078023412, 11.8962220959],
}
ONE_SHOWN = {
    (1, 0.1): [0.532338331259, 0.955251000071, 1.39523592483],
    (1, 0.5): [0.958208996265, 1.71945180013, 2.51142466469],
    (1, 0.9): [4.79104498133, 8.59725900064, 12.5571233235],
    (2, 0.1): [0.0967887875016, 0.173682000013, 0.25367925906],
    (2, 0.5): [0.63880599751, 1.14630120009, 1.67428310979],
    (2, 0.9): [4.53888471915, 8.14477168482, 11.8962220959],
}
WITH_MASK = {
    (1, 0.1): [0.558374781933, 0.96449227064, 1.4481571741],
    (1, 0.5): [1.00507460748, 1.73608608715, 2.60668291337],
    (1, 0.9): [5.02537303739, 8.68043043576, 13.0334145669],
    (2, 0.1): [0.101522687624, 0.175362231025, 0.263301304381],
    (2, 0.5): [0.670049738319, 1.15739072477, 1.73778860892],
    (2, 0.9): [4.76087971964, 8.22356567598, 12.3474453791],
}
UNIFORM = {
    (1, 0.1): [0.422958042587, 1.61049958483, 0.757832061975],
    (1, 0.5): [0.761324476657, 2.89889925269, 1.36409771156],
    (1, 0.9): [3.80662238328, 14.4944962634, 6.82048855778],
    (2, 0.1): [0.0769014622886, 0.292818106332, 0.137787647632],
    (2, 0.5): [0.507549651105, 1.93259950179, 0.90939847437],
    (2, 0.9): [3.6062738368, 13.7316280391, 6.46151547579],
}
VELOCITY = {
    (1, 0.1): [
        [0.309207105434, 0.113750937153, -0.422958042587],
        [0.15586011104, -0.539214125058, 0.383354014019],
        [-0.473707248257, 0.316525390873, 0.157181857384],
    ],
    (1, 0.5): [
        [0.556572789781, 0.204751686876, -0.761324476657],
        [0.280548199872, -0.970585425105, 0.690037225233],
        [-0.852673046863, 0.569745703571, 0.282927343292],
    ],
    (1, 0.9): [
        [2.78286394891, 1.02375843438, -3.80662238328],
        [1.40274099936, -4.85292712552, 3.45018612617],
        [-4.26336523432, 2.84872851786, 1.41463671646],
    ],
    (2, 0.1): [
        [0.0562194737153, 0.0206819885733, -0.0769014622886],
        [0.0283382020072, -0.0980389318288, 0.0697007298216],
        [-0.0861285905923, 0.0575500710678, 0.0285785195244],
    ],
    (2, 0.5): [
        [0.371048526521, 0.136501124584, -0.507549651105],
        [0.187032133248, -0.64705695007, 0.460024816822],
        [-0.568448697909, 0.379830469048, 0.188618228861],
    ],
    (2, 0.9): [
        [2.63639742528, 0.969876411517, -3.6062738368],
        [1.32891252571, -4.59750990839, 3.26859738268],
        [-4.03897759041, 2.69879543797, 1.34018215244],
    ],
}
CROSS_ENTROPY = 1.2329912480903895

# Frequencies after a step from t = 0.5 to 0.75, of the first row of logits: from the mask, without
# an output for it, and from symbol 0 of three.
FROM_MASK = {
    1: [0.109342746, 0.040360499, 0.243368745, 0.606927991],
    2: [0.078950003, 0.028957751, 0.175400257, 0.716691971],
}
FROM_TOKEN = {
    1: [0.716459751, 0.040236749, 0.243303493],
    2: [0.795571029, 0.028994, 0.175435007],
}
# The share that stays with c = 1: at the mask, and at a symbol of which the model is sure.
STAYED = {1: (0.3682625, 0.6067330), 2: (0.5134500, 0.3678373)}
DRAWS = 4_000_000

pytestmark = pytest.mark.usefixtures("x64")
every_time = pytest.mark.parametrize("n, t", sorted(ALL_MASKED))


def loss_at(objective, process, z, t) -> float:
    """Our integrand at their time t, of the logits without the mask's."""
    denoiser = exact.of_outputs(lambda z, t: jnp.asarray(LOGITS[None, :, :3]))
    batch, ours = exact.batch_of(X), jnp.asarray([1.0 - t])
    return float(objective.loss_at(denoiser, process, batch, jnp.asarray(z), ours)[0])


def softmax(logits) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)


def weight_of(n, t) -> float:
    """kappa' / (1 - kappa)."""
    return n * t ** (n - 1) / (1.0 - t**n)


def their_nats(weight, mu, z, x) -> float:
    """The page's formula for a token."""
    return weight * ((1.0 - mu[z]) if z == x else -np.log(mu[x]) - mu[z])


@every_time
def test_on_masks_their_loss_is_md4_s_integrand(n, t):
    """A token that is shown costs them weight (1 - mu_z), and us nothing."""
    process = Masking(3, SCHEDULES[n])
    found = loss_at(MD4(), process, [[3, 3, 3]], t)
    assert found == pytest.approx(sum(ALL_MASKED[n, t]), rel=1e-9)
    first, shown, last = ONE_SHOWN[n, t]
    assert loss_at(MD4(), process, [[3, 0, 3]], t) == pytest.approx(first + last, rel=1e-9)
    theirs = weight_of(n, t) * (1.0 - softmax(LOGITS[1, :3])[0])
    assert shown == pytest.approx(theirs, rel=1e-9)


@every_time
def test_an_output_for_the_mask_costs_them_more(n, t):
    """weight (-log(1 - p) - p), where p is the probability that it gives to the mask."""
    p = softmax(LOGITS)[[0, 2], 3]
    more = np.array(WITH_MASK[n, t])[[0, 2]] - np.array(ONE_SHOWN[n, t])[[0, 2]]
    np.testing.assert_allclose(more, weight_of(n, t) * (-np.log1p(-p) - p), rtol=1e-9)


@every_time
def test_on_uniform_noise_our_rates_are_theirs_and_an_exchange(n, t):
    """The rest goes to all symbols alike; of the right outputs it is in balance with q(z | x)."""
    process, time = Uniform(3, SCHEDULES[n], "mixture"), jnp.asarray([1.0 - t])
    rates = np.asarray(
        process.reverse_rates(jnp.asarray(LOGITS[None, :, :3]), jnp.asarray(Z), time)
    )
    away = np.arange(3) != Z[0, :, None]
    rest = (rates[0] - VELOCITY[n, t])[away].reshape(3, 2)
    np.testing.assert_allclose(rest[:, 0], rest[:, 1], rtol=1e-9)
    right = jnp.asarray(np.where(np.arange(3) == 2, 0.0, -1e4)) * jnp.ones((1, 3, 1))
    rates = np.array(process.reverse_rates(right, jnp.array([[0, 1, 2]]), time))[0]
    rates[:2, 2] -= weight_of(n, t)
    law = (1.0 - t**n) / 3.0 + t**n * (np.arange(3) == 2)
    flow = law[:, None] * rates
    assert (flow[~np.eye(3, dtype=bool)] > 0).all()
    np.testing.assert_allclose(flow, flow.T, rtol=1e-9)


@every_time
def test_on_uniform_noise_their_loss_is_another_number(n, t):
    """Its formula on the page is right, and `uniform_elbo` differs."""
    mu = softmax(LOGITS[:, :3])
    each = [their_nats(weight_of(n, t), mu[i], Z[0, i], X[0, i]) for i in range(3)]
    np.testing.assert_allclose(each, UNIFORM[n, t], rtol=1e-9)
    ours = loss_at(UniformELBO(), Uniform(3, SCHEDULES[n], "mixture"), Z, t)
    assert abs(ours / sum(UNIFORM[n, t]) - 1.0) > 0.01


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=["kappa t", "kappa t^2"])
def test_with_the_right_outputs_ours_is_the_entropy_and_theirs_more(schedule):
    """One token: 1.02965 and 1.31475 nats, the latter by quadrature of their own code too."""
    process, p = Uniform(3, schedule, "mixture"), exact.P_V3L1
    outputs = exact.uniform_outputs(process, p)
    ours = p @ exact.uniform_integral(UniformELBO(), outputs, process, exact.sequences(3, 1))
    assert ours == pytest.approx(-p @ np.log(p), rel=1e-6)
    theirs, (times, parts) = 0.0, exact.quadrature(nodes=60, power=3)
    kept, slope = schedule.alpha(jnp.asarray(times)), schedule.dalpha(jnp.asarray(times))
    for alpha, change, part in zip(np.asarray(kept), np.asarray(slope), parts, strict=True):
        law = alpha * np.eye(3) + (1.0 - alpha) / 3.0
        mu, weight = p[:, None] * law / (p @ law), -change / (1.0 - alpha)
        nats = [[their_nats(weight, mu[:, z], z, x) for z in range(3)] for x in range(3)]
        theirs += part * p @ (law * nats).sum(axis=1)
    assert theirs == pytest.approx(1.31475, abs=1e-5)


def test_cross_entropy_is_their_mean_times_the_length():
    found = loss_at(CrossEntropy(), Uniform(3, Linear(), "mixture"), Z, 0.5)
    assert found == pytest.approx(3.0 * CROSS_ENTROPY, rel=1e-9)


def test_any_order_without_weights_is_twice_the_sum_over_masks():
    """Their cross-entropy at masks, kappa = t: integrated over t and every pattern of masks."""
    process, denoiser = Masking(3), exact.denoiser_of(exact.table_logits(3, 2))
    found = exact.any_order(denoiser, process, exact.sequences(3, 2), AnyOrder(weight_power=0.0))

    def unweighted(batch, z, t):
        return masked_nats(denoiser, process, batch, z, t)

    times, parts = exact.quadrature(nodes=8)
    x = exact.sequences(3, 2)
    theirs = exact.expected(unweighted, 3, x, times, times) @ parts
    np.testing.assert_allclose(found, 2.0 * theirs, rtol=1e-9)


@pytest.mark.parametrize("n", [1, 2])
def test_their_step_on_masks_is_that_of_tau_leaping(n):
    process, s, t = Masking(3, SCHEDULES[n]), jnp.asarray(0.25), jnp.asarray(0.5)

    def gap(step) -> float:
        """The largest difference of the laws, in standard errors."""
        jump = float(step.reveal_probability(process, s, t))
        law = np.append(jump * softmax(LOGITS[0, :3]), 1.0 - jump)
        return np.max(np.abs(law - FROM_MASK[n]) / np.sqrt(law * (1.0 - law) / DRAWS))

    assert gap(TauLeaping()) < 4.0 < gap(TauLeaping("reject"))
    assert gap(Euler()) > 4.0


@pytest.mark.parametrize("n", [1, 2])
def test_their_step_on_uniform_noise_moves_less_than_tau_leaping(n):
    """A symbol y is reached with probability mu_y (1 - exp(-h weight))."""
    mu, h = softmax(LOGITS[0, :3]), 0.25
    law = mu * -np.expm1(-h * weight_of(n, 0.5))
    law[0] = 1.0 - law[1:].sum()
    assert np.max(np.abs(law - FROM_TOKEN[n]) / np.sqrt(law * (1.0 - law) / DRAWS)) < 4.0
    process, outputs = Uniform(3, SCHEDULES[n], "mixture"), jnp.asarray(LOGITS[None, :1, :3])
    rates = process.reverse_rates(outputs, jnp.zeros((1, 1), int), jnp.asarray([0.5]))
    ours = float(TauLeaping().jump_probability(h * jnp.sum(rates)))
    assert ours > 1.0 - law[0] + 0.01


@pytest.mark.parametrize("n", [1, 2])
def test_the_corrector_on_masks_has_the_rates_of_their_divergence_free_term(monkeypatch, n):
    """Of the mask theirs are twice the predictor's weight, of a token sigma alone."""
    chances = []
    monkeypatch.setattr(reveal, "exchange", lambda *a, **k: chances.extend(map(float, a[4])))
    small = 1e-7
    step, process = PredictorCorrector(size=1.0), Masking(3, SCHEDULES[n])
    step.correct(None, process, exact.chain_of([[3]]), jnp.asarray(0.5), small, None)
    remasks, reveals = np.array(chances) / small
    stayed = np.array(STAYED[n])
    theirs = -np.log(stayed) / 0.25
    error = np.sqrt((1.0 - stayed) / (stayed * DRAWS)) / 0.25
    assert np.all(np.abs([reveals + weight_of(n, 0.5), remasks] - theirs) < 4.0 * error)
