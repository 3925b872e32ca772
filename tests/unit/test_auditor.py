"""The auditor: no false alarm on the objectives of the package, and wrong losses found out."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import families
from md4_jax.auditor import audit
from md4_jax.auditor.report import numbers, text
from md4_jax.config import audits, schema
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.autoregressive import Autoregressive
from md4_jax.objectives.genmd4 import GenMD4
from md4_jax.objectives.gidd import GIDD
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.noising import noised
from md4_jax.objectives.prime import Prime
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.capabilities import ObservesMasks, RevealsMasks
from md4_jax.processes.hybrid import Hybrid
from md4_jax.processes.masking import Masking
from md4_jax.processes.partial_masking import PartialMasking
from md4_jax.processes.schedules import Clipped, Linear
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Needs, UserError
from md4_jax.runtime.commit import PACKAGE_ROOT

QUICK = (
    "md4, masking", "autoregressive, masking", "four steps, masking", "clipped schedule",
    "twice the weight", "small times",
)  # fmt: skip
# Variants of others, which are among the quick or slow tests.
VARIANTS = (
    "along_order, masking", "score_entropy, uniform, mixture", "uniform_elbo, uniform, mixture",
    "d3pm, uniform", "d3pm, transition", "d3pm, uniform, mixture", "d3pm, transition, mixture",
    "d3pm, transition, absorbing", "ctmc, rates, absorbing", "ctmc, rates, gaussian",
    "ctmc, rates, mixture", "blocks of one, masking", "a time for each block, masking",
    "bits for nats", "any_order, masking", "lambda_dce, masking", "md4_discrete, masking",
    "uniform_elbo, uniform", "half the weight", "nats per token", "times cut",
    "score_entropy, uniform, score", "bytes by assumption", "no prior", "d3pm, hybrid",
    "d3pm, hybrid, masks alone", "gidd, hybrid, masks alone", "right to left, masking",
    "four steps, uniform decoder, masking", "few masks", "kept for nothing",
    "generalized_kl, uniform", "generalized_kl, uniform, mixture",
    "generalized_kl, metric_path", "gidd, hybrid", "block, masking", "no reconstruction",
    "uniform noise in blocks, uniform, mixture",
)  # fmt: skip
STEPS = 40


def named(names):
    kinds = {n: pytest.mark.campaign if n in VARIANTS else pytest.mark.slow for n in names}
    return [pytest.param(n, marks=[] if n in QUICK else kinds[n]) for n in names]


def bounds() -> list[str]:
    """The pairs of objective and process in which the objective says that it is a bound.

    Without texts that grow, whose sequences are of all lengths (test_flexmdm.py), and Gaussian
    noise, which no table reads (test_candi.py).
    """
    pairs = {
        name: (of, make)
        for name, (of, make) in exact.FITTING.items()
        if not (of.needs.gaps or isinstance(make(3), ObservesMasks))
    }
    return [name for name, (of, make) in pairs.items() if of.is_bound(make(3))]


OTHERS = dict.fromkeys(["sdtt", "dcd", "preference"], "another model")


@pytest.mark.parametrize("name, what", (OTHERS | {"policy": "rewards of samples"}).items())
def test_what_learns_from_something_else_is_refused(name, what):
    words = {"objective.name": name, "process.name": "uniform" if name == "dcd" else "masking"}
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / "base.py"), words)
    said = f"objective.name='{name}' cannot be audited: it learns from {what}"
    with pytest.raises(UserError, match=said):
        audits.objectives(config)


@pytest.mark.parametrize("name", named(bounds()))
@pytest.mark.cases(1)
def test_no_false_alarm(name):
    objective, make = exact.FITTING[name]
    # Chains with jumps have many outcomes.
    size = (2, 2) if name.startswith("ctmc") else (3, 2)
    found = audit(objective, make(vocab_size=3), problems=(size,), steps=STEPS)
    assert found.passed and found.claims, text(found)
    assert "counterexample" not in text(found)
    # Draws of the objective's own (orders, blocks) are averaged over, the others enumerated.
    own = name.startswith(
        ("block", "a time", "along_order", "uniform noise in blocks", "eso", "wedlm")
    )
    assert found.results[0].enumerated is not own


@pytest.mark.campaign
def test_a_training_loss_that_says_so_passes():
    short = Masking(3, Clipped(Linear(), 0.2))
    found = audit(MD4(), short, problems=((3, 2),), steps=5)
    assert found.passed and not found.claims and not found.is_bound
    assert "the objective itself does not claim to be a bound" in text(found)


@dataclasses.dataclass(frozen=True)
class Wrong:
    """An objective with its number changed, which still claims to be a bound."""

    right: Any
    change: Callable

    @property
    def needs(self):
        return self.right.needs

    @property
    def timesteps(self):
        return getattr(self.right, "timesteps", None)

    def is_bound(self, process) -> bool:
        return True

    def __call__(self, denoiser, process, batch, u, keys):
        nats, parts = self.right(denoiser, process, batch, u, keys)
        return self.change(nats, parts, batch), parts


@dataclasses.dataclass(frozen=True)
class JointReconstruction:
    """An energy couples the reconstructed tokens, and -log p of all masked ones is weighed by 1/t.

    The bound wants the conditional of each token; the joint one costs less.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))

    def is_bound(self, process) -> bool:
        return True

    def __call__(self, denoiser, process, batch, u, keys):
        z, t = noised(process, batch, u, keys)
        logits = jax.nn.log_softmax(denoiser(z, t), axis=-1)
        every = jnp.asarray(exact.sequences(process.vocab_size, z.shape[1]))
        each = logits[:, jnp.arange(z.shape[1]), every]
        masked = process.is_noise(z)[:, None]
        energy = 3.0 * (every[:, 0] == every[:, -1]) + jnp.sum(jnp.where(masked, each, 0.0), axis=2)
        fits = jnp.all(masked | (every == z[:, None]), axis=2)
        total = jax.nn.logsumexp(jnp.where(fits, energy, -jnp.inf), axis=1)
        own = jnp.all(every == batch.tokens[:, None], axis=2)
        return (total - jnp.sum(jnp.where(own, energy, 0.0), axis=1)) / t, {}


@dataclasses.dataclass(frozen=True)
class TimesCut(MD4):
    """The integral from 0.05 on, without the rest."""

    def __call__(self, denoiser, process, batch, u, keys):
        nats, parts = super().__call__(denoiser, process, batch, 0.05 + 0.95 * u, keys)
        return 0.95 * nats, parts


@dataclasses.dataclass(frozen=True)
class KeptForNothing(GIDD):
    """Tokens that noise has left as they are cost nothing, as with masks."""

    def weight(self, process, x, z, t):
        return jnp.where(z == x, 0.0, super().weight(process, x, z, t))


@dataclasses.dataclass(frozen=True)
class PublishedTimes(GIDD):
    """The integral from 1e-4 to 1 - 1e-4 alone, as published."""

    def __call__(self, denoiser, process, batch, u, keys):
        return super().__call__(denoiser, process, batch, 1e-4 + (1.0 - 2e-4) * u, keys)


@dataclasses.dataclass(frozen=True)
class SmallTimes(MD4):
    """t ~ U(0, 1/2): right for the uniform denoiser, so that only a search finds it out."""

    def __call__(self, denoiser, process, batch, u, keys):
        return super().__call__(denoiser, process, batch, 0.5 * u, keys)


@dataclasses.dataclass(frozen=True)
class SeesTheAnswer(Autoregressive):
    """The network reads x itself in place of x shifted by one."""

    def __call__(self, denoiser, process, batch, u, keys):
        return self.loss_at(denoiser, process, batch, batch.tokens, jnp.zeros(len(u))), {}


@dataclasses.dataclass(frozen=True)
class Claims(AnyOrder):
    """A training-only loss that claims to be a bound."""

    def is_bound(self, process) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class ClaimsPrime(Prime):
    """The published loss of partial masking, as if it were a bound."""

    def is_bound(self, process) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class ClippedMD4(MD4):
    """MD4's integral over what a clipped schedule leaves, without the other terms."""

    def is_bound(self, process) -> bool:
        return True


def scaled(factor) -> Callable:
    return lambda nats, parts, batch: factor * nats


def without(part) -> Callable:
    return lambda nats, parts, batch: nats - parts[part]


LINEAR = Masking(3)
SHORT = Uniform(3, Clipped(Linear(), 0.1))
WRONG = {
    "joint reconstruction": (JointReconstruction(), LINEAR, "bound"),
    # MD4's own code, at its own eps: 3e-4 nats short.
    "clipped schedule": (ClippedMD4(), Masking(3, Clipped(Linear(), 1e-4)), "bound"),
    "times cut": (TimesCut(), LINEAR, "bound"),
    "small times": (SmallTimes(), LINEAR, "bound"),
    "kept for nothing": (KeptForNothing(), Hybrid(3, 0.2), "bound"),
    "published times": (PublishedTimes(), Hybrid(3, 0.2), "bound"),
    "no prior": (Wrong(UniformELBO(), without("prior")), SHORT, "bound"),
    "no reconstruction": (
        Wrong(GenMD4(first_time=0.1), without("reconstruction")), StateDependent(3), "bound"
    ),
    "half the weight": (Wrong(MD4(), scaled(0.5)), LINEAR, "bound"),
    "twice the weight": (Wrong(MD4(), scaled(2.0)), LINEAR, "tight"),
    "bytes by assumption": (Wrong(AnyOrder(), scaled(1 / 4.5)), LINEAR, "bound"),
    "nats per token": (
        Wrong(AnyOrder(), lambda nats, parts, batch: nats / jnp.sum(batch.loss_mask, axis=1)),
        LINEAR,
        "bound",
    ),
    "bits for nats": (Wrong(AnyOrder(), scaled(1 / math.log(2.0))), LINEAR, "tight"),
    "few masks": (Claims(max_masked=0.5), LINEAR, "bound"),
    "sees the answer": (SeesTheAnswer(), LINEAR, "bound"),
    "joint of sub-tokens": (ClaimsPrime("joint"), PartialMasking(3, parts=4), "bound"),
}  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", named(WRONG))
@pytest.mark.cases(1)
def test_a_wrong_loss_is_found_out(name):
    objective, process, what = WRONG[name]
    found = audit(objective, process, problems=((3, 2),), steps=STEPS)
    assert not found.passed
    assert (found.is_bound, found.is_tight)[what == "tight"] is False
    said = text(found)
    assert "counterexample: x of 2 tokens" in said
    assert numbers(found)["passed"] is False
    result = found.results[0]
    worst = result.largest if what == "bound" else result.closest
    # The counterexample is one: the numbers that are printed give what is claimed.
    rows = result.problem.groups[worst.group]
    if what == "bound":
        assert np.exp(-worst.nats[rows]).sum() > 1.0
        assert np.log(np.exp(-worst.nats[rows]).sum()) == pytest.approx(worst.value, abs=1e-9)
    else:
        assert worst.nats[rows].mean() > np.log(rows.sum()) + 0.02
    assert f"{worst.nats[rows][0]:.6f}" in said


def test_m11_the_sums_are_those_of_the_identity():
    """The table denoiser of the identities: 0.8499 over V = 3, L = 2, for both forms."""
    from md4_jax.auditor.problem import problem, rule

    with jax.enable_x64(True):
        logits = np.zeros((4, 16, 2, 3))
        # The auditor's code has the first position as the lowest digit.
        z = exact.sequences(4, 2)
        logits[0, z @ [1, 4]] = exact.table_logits(3, 2)
        for objective in (MD4(), AnyOrder()):
            case = problem(objective, Masking(3), 3, 2)
            nats = jax.jit(case.nats(rule(case.steps, 24)))(
                jnp.asarray(logits), *jax.random.split(jax.random.key(0))
            )
            np.testing.assert_allclose(np.exp(-nats[:9]).sum(), 0.84991548841, rtol=2e-6)


@pytest.mark.slow
def test_the_problems_are_named_before_they_are_solved():
    told = []
    audit(MD4(), Masking(2), problems=((2, 1), (3, 1)), steps=1, say=told.append)
    assert told == [
        f"problem {n} of 2, all texts of 1 token over {n + 1} symbols ..." for n in (1, 2)
    ]


def test_symbols_of_a_large_vocabulary_do_not_hinder():
    """Those that change the length of a text, of an imported DreamOn; at one length it is masks."""
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / "dreamon_shakespeare.py"), {})
    config["process"] |= {"expand": 151_666, "delete": 151_643}
    config["objective"] = {"name": "md4"}
    found, process = audits.objectives(config)
    assert found["objective"] == MD4() and (process.expand_id, process.delete_id) == (1, 2)
    told = [audit(MD4(), p, problems=((2, 1),), steps=1) for p in (process, Masking(3))]
    assert told[0].passed and told[0].results[0].largest.value == told[1].results[0].largest.value


def test_an_objective_that_does_not_fit_the_process_is_refused():
    """Also one of an evaluator, before anything is audited."""
    config = families.get_config("udlm").to_dict()
    config["evals"]["test"]["objective"] = {"name": "md4"}
    with pytest.raises(UserError, match="evals.test.objective.name='md4' needs .* not 'uniform'"):
        audits.objectives(config)
    config["evals"]["test"]["objective"] = {"name": "uniform_elbo"}
    config["objective"] = {"name": "genmd4"}
    with pytest.raises(UserError, match="'genmd4' needs process.name='state_dependent'"):
        audits.objectives(config)
