"""Monte-Carlo means of the objectives against their exact values, in standard errors."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.draws import draws
from md4_jax.objectives.genmd4 import GenMD4
from md4_jax.objectives.md4 import MD4, DiscreteMD4
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Clipped, Cosine, Geometric, Linear, Polynomial
from md4_jax.processes.state_dependent import StateDependent

pytestmark = pytest.mark.slow

N, K = 40_000, 4.5
X = np.array([[0, 1, 1]])
TABLE = exact.denoiser_of(exact.table_logits(2, 3))
TIMED = exact.denoiser_of(exact.table_logits(2, 3), time=0.8)


def estimate(objective, denoiser, process, seed=0) -> np.ndarray:
    """N values of one sequence with independent u."""

    @jax.jit
    def run(key):
        u = jax.random.uniform(jax.random.fold_in(key, 1), (N,))
        batch = exact.batch_of(np.repeat(X, N, axis=0))
        return objective(denoiser, process, batch, u, jax.random.split(key, N))[0]

    return np.asarray(run(jax.random.key(seed)), np.float64)


def assert_mean(values, expected):
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - expected) < K * error, (values.mean(), expected, error)
    assert error < 0.02 * expected  # so that the test says something


@pytest.mark.parametrize(
    "denoiser, process",
    [
        (TABLE, Masking(2)),
        (TIMED, Masking(2)),
        (TIMED, Masking(2, Cosine())),
        (TIMED, Masking(2, Geometric(0.1, 3.0))),
        (TIMED, Masking(2, Clipped(Cosine(), 0.05))),
    ],
)
@pytest.mark.cases(3)
def test_any_order(denoiser, process):
    """n = 40,000, within 4.5 standard errors of the enumerated bound; time from its Beta law."""
    expected = exact.any_order(denoiser, process, X, nodes=400)[0]
    assert_mean(estimate(AnyOrder(), denoiser, process), expected)


@pytest.mark.parametrize("steps, form", [(4, "model"), (4, "uniform"), (64, "model")])
def test_discrete_time(steps, form):
    """M08: n = 40,000, within 4.5 standard errors."""
    expected = {
        (4, "model"): 2.8339142296,
        (4, "uniform"): 2.5150287079,
        (64, "model"): 2.9967686516,
    }[steps, form]
    assert_mean(estimate(DiscreteMD4(steps, form), TABLE, Masking(2)), expected)


@pytest.mark.parametrize("denoiser", [TABLE, TIMED])
def test_continuous_time_where_the_variance_is_finite(denoiser):
    """M12: the polynomial schedule t^2 has a second moment; n = 40,000, within 4.5 errors."""
    process = Masking(2, Polynomial(2.0))
    expected = exact.continuous(denoiser, process, X)[0]
    assert_mean(estimate(MD4(), denoiser, process), expected)


def test_continuous_time_linear_by_strata():
    """The linear schedule has no variance: the strata of the step are averaged instead.

    Batches of 512 over 200 steps, n = 102,400; the mean over steps within 4.5 of
    its errors, which the heavy tail makes wide.
    """

    def one(step):
        u, keys = draws(3, step, 512)
        batch = exact.batch_of(np.repeat(X, 512, axis=0))
        return MD4()(TABLE, Masking(2, Linear()), batch, u, keys)[0].mean()

    means = np.asarray(jax.jit(lambda steps: jax.lax.map(one, steps))(jnp.arange(200)))
    assert_mean(means, 3.0076040293)


def test_strata_leave_less_noise_than_independent_times():
    """Any order, batches of 64: the scatter of 300 batch means (known to 4 %) shrinks."""

    def batch_means(stratified):
        def one(step):
            u, keys = draws(3, step, 64)
            if not stratified:
                u = jax.vmap(jax.random.uniform)(jax.vmap(jax.random.fold_in, (0, None))(keys, 9))
            batch = exact.batch_of(np.repeat(X, 64, axis=0))
            return AnyOrder()(TABLE, Masking(2), batch, u, keys)[0].mean()

        return np.asarray(jax.jit(lambda s: jax.lax.map(one, s))(jnp.arange(300)))

    spread, loose = batch_means(True), batch_means(False)
    assert_mean(spread, 3.0076040293)
    assert spread.std() < 0.9 * loose.std()


def test_g05_the_gradient_in_the_powers():
    """GenMD4, n = 20,000 rows: d/dw within 4 standard errors of the enumerated one, each w."""
    power = jnp.asarray([0.8, 1.0, 1.5])
    process = StateDependent(3, raw_power=jnp.log(jnp.expm1(power)))
    objective = GenMD4(first_time=0.05)
    rows, denoiser = 20_000, exact.denoiser_of(exact.table_logits(3, 2))
    batch = exact.batch_of(np.tile([[1, 2]], (rows, 1)))
    u, keys = jax.random.uniform(jax.random.key(5), (rows,)), exact.keys_for(6, rows)

    def one(process, u, key):
        row = jax.tree.map(lambda a: a[:1], batch)
        return objective(denoiser, process, row, u[None], key[None])[0][0]

    each = jax.jit(jax.vmap(jax.grad(one), in_axes=(None, 0, 0)))(process, u, keys).raw_power
    in_power = np.asarray(each) / np.asarray(jax.nn.sigmoid(process.raw_power))
    error = in_power.std(axis=0) / np.sqrt(rows)
    expected = [0.49831985901, -0.26650926983, -0.050757421721]
    assert (np.abs(in_power.mean(axis=0) - expected) < 4 * error).all()
    assert (error < 0.06).all()
