"""Which process has which ability, and that abilities and not classes are asked for."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives import OBJECTIVES
from md4_jax.objectives.md4 import MD4
from md4_jax.processes import PROCESSES, capabilities, lengths
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Process

PROTOCOLS = {
    name: value
    for name, value in (vars(capabilities) | vars(lengths)).items()
    if Process in getattr(value, "__mro__", ()) and value is not Process
}
# `exact` leaves `resizing` out: of one length it is `masking`.
CASES = exact.PROCESS_CASES | {"resizing": PROCESSES["resizing"]}
STEPS = {"PredictsClean", "HasReverse", "HasPrior", "HasPosterior"}
INTERPOLATING = STEPS | {"HasRates", "HasScore", "Interpolates"}
SCORES = {"PredictsClean", "HasReverse", "HasRates", "HasForwardRates", "HasScore"}
FLOWS = {"PredictsClean", "HasFlow"}
REDRAWS = {"HasPrior", "HasPosterior", "HasFlow", "RedrawsUniformly"}
ABILITIES = {
    "masking": {"RevealsMasks"},
    "state_dependent": {"RevealsBySymbol", "HasRates"},
    "uniform": SCORES | REDRAWS,
    "uniform, mixture": SCORES | REDRAWS,
    "uniform, score": SCORES | REDRAWS,
    "hybrid": INTERPOLATING,
    "hybrid, masks alone": INTERPOLATING,
    "transition": STEPS,
    "transition, mixture": STEPS,
    "transition, absorbing": STEPS,
    "rates": SCORES | {"HasPrior", "HasGenerator"},
    "rates, absorbing": SCORES | {"HasPrior", "HasGenerator"},
    "rates, gaussian": SCORES | {"HasPrior", "HasGenerator"},
    "rates, mixture": SCORES | {"HasPrior", "HasGenerator"},
    "resizing": {"RevealsMasks", "ResizesMasks"},
    "insertion": {"Grows", "InsertsMasks"},
    "deletion": {"Grows", "InsertsTokens"},
    "edits": {"Grows", "EditsMasks"},
    "metric_path": FLOWS | {"HasPrior", "FollowsDistances"},
    "partial_masking": {"PredictsClean", "RevealsParts"},
    "gaussian_masking": {"HasPrior", "ObservesMasks"},
    "gaussian_masking, joint": {"HasPrior", "ObservesMasks"},
}
# Whether what is not noise is clean: pure masking.
SHOWS_CLEAN = {
    "masking", "resizing", "state_dependent", "transition, absorbing", "rates, absorbing",
    "hybrid, masks alone", "insertion", "deletion", "edits", "gaussian_masking",
    "gaussian_masking, joint", "partial_masking",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_abilities_of_a_process(name):
    process = CASES[name](4).init()
    found = {known for known, protocol in PROTOCOLS.items() if isinstance(process, protocol)}
    assert found == ABILITIES[name] and isinstance(process, Process)
    assert process.shows_clean == (name in SHOWS_CLEAN)
    made = CASES[name](4)
    assert {known for known, p in PROTOCOLS.items() if isinstance(made, p)} == found


def test_the_table_has_every_process_and_every_ability():
    assert set(ABILITIES) == set(CASES)
    assert set().union(*ABILITIES.values()) == set(PROTOCOLS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.cases(10)
def test_noise_is_what_says_nothing_of_x(name):
    """The mask and no other symbol; z at t = 1 of pure masking holds nothing else."""
    process = CASES[name](4).init()
    masks = [True] * (name in SHOWS_CLEAN)
    marked = process.is_noise(jnp.arange(4 + len(masks)))
    np.testing.assert_array_equal(marked, [False] * 4 + masks)
    if process.shows_clean:
        z = process.corrupt(exact.keys_for(0, 2), jnp.zeros((2, 8), jnp.int32), jnp.ones(2))
        assert process.is_noise(z).all()
    assert not bool(process.noise_left(jnp.float32(0.0)))
    assert bool(process.noise_left(jnp.float32(1.0)))


INNER = Masking(3)
NAMES = {
    *("vocab_size", "mask_id", "timesteps", "shows_clean", "is_complete", "schedule"),
    *("corrupt", "prior", "is_noise", "noise_left", "signal", "learned"),
    *("init", "reveal_probability", "mask_each", "mask_exactly"),
}


def foreign_masking(names=NAMES):
    """Masks, of no class of the package: what RevealsMasks names and nothing else.

    The class itself has the names: from Python 3.12 on a protocol does not ask `__getattr__`.
    """
    asked = {name: property(lambda _, name=name: getattr(INNER, name)) for name in names}
    return type("Blackout", (), asked)()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.cases(16)
def test_a_process_of_another_class_with_these_methods_will_do(name):
    """The numbers are those of Masking; objectives of other noise do not take it."""
    objective, foreign = OBJECTIVES[name](), foreign_masking()
    assert not isinstance(foreign, Masking)
    assert exact.fits(objective, foreign) == exact.fits(objective, Masking(3))
    if not exact.fits(objective, foreign):
        return
    x = exact.sequences(3, 2)
    denoiser = exact.denoiser_of(exact.table_logits(3, 2), time=0.5)
    arguments = exact.labelled(x), (jnp.arange(9) + 0.5) / 9, exact.keys_for(0, 9)
    found, expected = (
        jax.jit(lambda p=process: objective(denoiser, p, *arguments)[0])()
        for process in (foreign, Masking(3))
    )
    np.testing.assert_array_equal(found, expected)
    assert objective.is_bound(foreign) == objective.is_bound(Masking(3))


def test_a_missing_method_is_a_missing_ability():
    short = foreign_masking(NAMES - {"mask_exactly"})
    assert exact.fits(MD4(), foreign_masking()) and not exact.fits(MD4(), short)
