"""Whole runs of every sampler from one end of steep schedules to the other."""

import ends
import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.samplers import draw
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt, sample

STEEP = ("polynomial, steep", "geometric, long")


# Every sampler once, with the first process that it fits; all pairs are a campaign.
FIRST = {name.partition(";")[0]: name for name in reversed(ends.PAIRS)}.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, of",
    [
        pytest.param(*pair, id=name, marks=[] if name in FIRST else pytest.mark.campaign)
        for name, pair in ends.PAIRS.items()
    ],
)
@pytest.mark.cases(2)
def test_a_whole_run_draws_from_laws_alone(make, of, monkeypatch):
    """Two tokens, 32 sequences, from t = 1 to 0 by a small last step: a row that is no law would be
    drawn as a symbol that is none, and a chance that is no number would stay in `confidence`."""
    honest = draw._gumbel_max

    def marked(key, logits):
        largest = jnp.max(logits, axis=-1)  # nan where one is
        return jnp.where(jnp.isfinite(largest), honest(key, logits), -1000)

    monkeypatch.setattr(draw, "_gumbel_max", marked)
    denoiser = exact.denoiser_of(exact.table_logits(3, 2))
    built = (ends.with_schedule(exact.PROCESS_CASES[of], ends.ALL[name]) for name in STEEP)
    processes = [process for process in built if process] or [exact.PROCESS_CASES[of](3).init()]
    steps = getattr(processes[0], "timesteps", None)
    grid = np.array([0.0, 1e-3, 0.5, 1.0], np.float32) if steps is None else uniform(steps)

    @jax.jit
    def runs(keys):
        return [
            sample(denoiser, process, make(), grid=grid, keys=keys, prompt=no_prompt(32, 2))[0]
            for process in processes
        ]

    for chain in runs(exact.keys_for(0, 32)):
        # A text that grows may end before the array does.
        ended = make().needs.gaps & (chain.z == 4)
        assert (((chain.z >= 0) & (chain.z < 3)) | ended).all()
        assert ((chain.confidence >= 0) & (chain.confidence <= 1)).all()
