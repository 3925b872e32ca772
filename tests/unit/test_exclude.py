"""Symbols that samples must not have, on noise that is no mask."""

import exact
import numpy as np
import pytest

from md4_jax.processes.masking import Masking
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import UserError
from md4_jax.samplers import SAMPLERS
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.transforms import Transform, predicts_ratios

V, NEVER, ROWS = 3, 1, 300


def combinations() -> list:
    """Every process whose noise is no mask with every sampler that may exclude symbols there."""
    found = []
    for name, make in exact.PROCESS_CASES.items():
        process = make(V).init()
        if process.shows_clean or predicts_ratios(process):
            continue
        for sampler, of in exact.samplers_for(process).items():
            try:
                step = of(transform=Transform(excluded=(NEVER,)))
                getattr(step, "check", lambda process: None)(process)
            except UserError:
                continue
            quick = (name, sampler) == ("uniform", "ancestral")
            marks = () if quick else pytest.mark.campaign
            found.append(pytest.param(process, step, id=f"{name}, {sampler}", marks=marks))
    return found


@pytest.mark.parametrize("process, step", combinations())
def test_what_the_noise_drew_does_not_stay(process, step):
    """A third of the symbols of the prior is the excluded one, and the network likes it."""
    table = exact.denoiser_of(exact.table_logits(V, 2) + 2.0 * np.eye(V)[NEVER], time=0.3)
    grid = uniform(process.timesteps or 3)
    z, _ = exact.drawn(table, process, step, grid, exact.keys_for(0, ROWS))
    assert np.unique(z).tolist() == [0, 2]


@pytest.mark.parametrize(
    "name, options",
    [("euler", {}), ("tau_leaping", {}), ("predictor_corrector", {"predictor": "euler"})],
)
def test_jumps_that_may_not_happen_are_refused(name, options):
    step = SAMPLERS[name](transform=Transform(excluded=(NEVER,)), **options)
    step.check(Masking(V))
    with pytest.raises(
        UserError, match=f"used with sample.name='{name}' unless the noise consists"
    ):
        step.check(Uniform(V))
    SAMPLERS[name](**options).check(Uniform(V))
