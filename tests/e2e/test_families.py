"""Every family of configs/families.py trains, evaluates and samples from the command line."""

import json
import math

import numpy as np
import pytest
import runs

from configs.families import FAMILIES
from md4_jax.objectives import OBJECTIVES

pytestmark = pytest.mark.slow

FILE = "configs/families.py"
SHORT = (
    "data.name=shakespeare",
    "data.length=16",
    "tokenizer.name=characters",
    "network.size=32",
    "network.heads=2",
    "network.hidden=64",
    "network.depth=1",
    "train.num_steps=6",
    "train.batch_size=8",
    "optim.warmup_steps=2",
    "optim.process_learning_rate=0.01",
    "log.every=3",
    "evals.validation.every=0",
    "evals.test.batch_size=64",
    "evals.test.draws=1",
    "evals.test.split=validation",
    "sample.num=2",
    "sample.steps=4",
)
# Losses that bound no likelihood, or not for the schedule of their family.
TRAINING_ONLY = ("concrete_score", "cross_entropy", "duo", "gidd")
# Not in a family of their own: a T-step bound that d3pm is equal to, two evaluations, what needs a
# teacher, texts of several lengths (configs/flex_owt.py and edit_owt.py), a network or a sampler of
# its own (configs/partition_owt.py, wedlm_owt.py, flow_text8.py, test_sdlm.py), a process of its
# own (configs/candi_text8.py, prime_text8.py), a config of its own (proseco_owt.py and
# prism_owt.py), or data of its own (test_preference.py, test_policy.py).
ELSEWHERE = {
    "md4_discrete", "along_order", "every_order", "sdtt", "dcd", "flexmdm", "edit_flow",
    "masked_edit_flow", "partition", "candi", "generalized_kl", "preference", "policy",
    "classifier", "dreamon", "reparameterized", "wedlm", "sdlm", "prime", "proseco",
    "prism",
}  # fmt: skip
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def words(family: str) -> list[str]:
    """A run of a few seconds of that family."""
    own = ("process.timesteps=4",) if "timesteps" in FAMILIES[family][0] else ()
    return ["--config", f"{FILE}:{family}", *(f"--config.{word}" for word in (*SHORT, *own))]


def test_every_objective_is_in_a_family():
    used = {objective for _, *both, _, _ in FAMILIES.values() for objective in both}
    assert used - {"auto"} | ELSEWHERE == set(OBJECTIVES)


def evaluations(workdir) -> int:
    """The most that a sample of the run took."""
    return runs.evaluated(workdir, "samples")["network_evaluations_max"]


# Their code is that of another family here, of one that learns a known source (test_entropy.py)
# or of a config (test_configs.py); they run in the campaign.
ALIKE = (
    "md4", "radd_t_dce", "sedd_absorb", "d3pm_absorb", "d3pm_uniform", "d3pm_gauss", "udlm",
    "tauldr_uniform", "sedd_uniform", "uniform_ce", "duo", "radd_lambda_dce", "any_order", "ar",
    "genmd4", "gidd", "block", "e2d2",
)  # fmt: skip
EVERY = [
    pytest.param(family, marks=pytest.mark.campaign if family in ALIKE else [])
    for family in FAMILIES
]


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.cases(1)
def test_each_trains_evaluates_and_samples(family, run, rows, tmp_path):
    workdir = tmp_path / "run"
    ended = run(*words(family), "--workdir", workdir)
    assert ended.code == 0, ended.err
    lines = rows(workdir)
    assert [line["step"] for line in lines] == [3, 6]
    if FAMILIES[family][1] in TRAINING_ONLY:
        assert all(math.isfinite(line["train_loss_bits"]) for line in lines)
        assert all("train_bits_per_token" not in line for line in lines)
    else:
        assert all(0 < line["train_bits_per_token"] < 16 for line in lines)
    kept = runs.evaluated(workdir)
    # Six steps away from uniform: near log2 of the vocabulary, and a real number. A mixture that
    # is not sharp at t = 0 yet costs more, with log(1/t) (docs/families/uniform.md).
    most = 30 if family == "uniform_ce" else 9
    assert math.isfinite(kept["bits_per_token_se"]) and 3 < kept["bits_per_token"] < most
    # Left to right: one for each token. The geometric schedule leaves noise that is then removed.
    # Of four steps, on masks those that change nothing cost none.
    # Eso-LM's do so in diffusion's four steps, before the others from left to right.
    used = {"ar": 16, "uniform_ce": 5}.get(family, 4)
    masks = FAMILIES[family][0]["name"] == "masking" and family != "ar"
    found = evaluations(workdir)
    assert 1 <= found <= (16 if family == "eso" else 4) if masks else found == used
    if family == "genmd4":
        assert "power by symbol: min" in ended.out
        assert lines[-1]["power_min"] < 2.0 < lines[-1]["power_max"]


@pytest.mark.campaign
@pytest.mark.parametrize("order", ["random", "left_to_right"])
def test_a_masked_model_is_evaluated_along_an_order(order, run, tmp_path):
    workdir = tmp_path / "run"
    asked = (*words("any_order"), "--workdir", workdir)
    assert run(*asked).code == 0
    bound = runs.evaluated(workdir)["bits_per_token"]
    along = (
        "evals.test.objective.name=along_order",
        f"evals.test.objective.order={order}",
        "evals.test.limit=64",
    )
    ended = run(*asked, "--mode", "eval", *(f"--config.{word}" for word in along))
    assert ended.code == 0, ended.err
    exact = json.loads(ended.out.splitlines()[-1])
    assert exact["bits_per_token"] == pytest.approx(bound, abs=0.2)


@pytest.mark.campaign
def test_a_model_of_clean_text_is_sampled_by_metropolis(run, tmp_path):
    clean = ("objective.form=matching", "objective.time=0.0")
    own = (*clean, "sample.name=metropolis", "sample.proposals=3")
    ended = run(
        *words("concrete_score"), "--workdir", tmp_path / "run", *(f"--config.{w}" for w in own)
    )
    assert ended.code == 0, ended.err
    assert evaluations(tmp_path / "run") == 12


@pytest.mark.campaign  # test_pairs.py takes one step of it on eight devices
def test_a_learned_schedule_is_the_same_on_eight_devices(start, tiny, rows, arrays, scratch):
    """Six steps of GenMD4, REINFORCE included, on one device and on 2 x 2 x 2: to rounding."""
    runs = {"one": ("mesh.data=1",), "mixed": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")}
    arguments = [tiny.with_name("driver.py"), "runs"]
    for name, mesh in runs.items():
        extra = [f"--config.{word}" for word in mesh]
        workdir = scratch / f"genmd4 {name}"
        arguments += [*words("genmd4"), "--workdir", workdir, *extra, "--"]
    process = start(*arguments, **EIGHT)
    _, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    one, mixed = (rows(scratch / f"genmd4 {name}") for name in runs)
    for key in ("train_bits_per_token", "grad_norm", "power_mean"):
        np.testing.assert_allclose([r[key] for r in one], [r[key] for r in mixed], rtol=1e-4)
    power = "params/process/raw_power"
    np.testing.assert_allclose(
        *(arrays(scratch / f"genmd4 {name}")[power] for name in runs), atol=1e-4
    )
