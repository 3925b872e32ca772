"""Monte-Carlo means of tauLDR's bound against states and jumps that are enumerated."""

import chains
import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.ctmc import CTMC
from md4_jax.processes.rates import Rates

pytestmark = pytest.mark.slow

N, K = 40_000, 4.0
X = np.array([[1, 2]])
TABLE = exact.denoiser_of(exact.table_logits(3, 2), time=0.5)
KERNELS = {
    "uniform": dict(),
    "absorbing": dict(kernel="absorbing"),
    "gaussian": dict(kernel="gaussian_symmetric", rate_width=1.0, stationary_width=0.4),
}


def within(values, expected):
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - expected) < K * error, (values.mean(), expected, error)
    assert error < 0.03 * expected  # so that the test says something


@pytest.mark.parametrize("passes", ["two", "one_weighted", "one"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.cases(2)
def test_the_mean_of_the_draws_at_a_time(kernel, passes):
    """t = 0.4, n = 40,000 draws of z and of its jump, within 4 standard errors."""
    process, objective = Rates(3, **kernel), CTMC(passes, 0.0)
    exactly = chains.integrand(objective, TABLE, process, X, [0.4])[0, 0]
    batch, keys = exact.batch_of(np.repeat(X, N, axis=0)), exact.keys_for(2, N)
    call = jax.jit(lambda u: objective(TABLE, process, batch, u, keys)[0])
    within(np.asarray(call(jnp.full(N, 0.4)), np.float64), exactly)


@pytest.mark.parametrize("passes", ["two", "one_weighted"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.cases(2)
def test_the_mean_over_time_with_both_ends(kernel, passes):
    """t from U(0.1, 1), reconstruction at 0.1, n = 40,000, within 4 standard errors."""
    process, objective = Rates(3, **kernel), CTMC(passes, 0.1)
    expected = chains.bound(objective, TABLE, process, X)[0]
    batch, keys = exact.batch_of(np.repeat(X, N, axis=0)), exact.keys_for(3, N)
    u = jax.random.uniform(jax.random.key(4), (N,))
    nats = jax.jit(lambda u: objective(TABLE, process, batch, u, keys)[0])(u)
    within(np.asarray(nats, np.float64), expected)
