"""Results of an audit as text and as numbers."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.auditor.audit import ERRORS, Audit, Audited, Found
from md4_jax.auditor.denoisers import tabled
from md4_jax.auditor.problem import Problem
from md4_jax.protocols.phrases import amount

MOST = 27  # lines of a table


def text(audit: Audit) -> str:
    """Describes an audit: the measurements, a counterexample if there is one, and the verdict."""
    lines = [f"{audit.objective}", f"with {audit.process}"]
    for result in audit.results:
        lines += _measured(result)
        if not result.is_bound:
            lines += _of_sum(result)
        elif not (result.is_tight or audit.is_loose):
            lines += _of_excess(result)
    return "\n".join([*lines, f"verdict: {verdict(audit)}"])


def verdict(audit: Audit) -> str:
    """Returns the verdict in one sentence."""
    if not audit.is_bound:
        found = "not a bound of -log p"
    elif audit.is_loose and not audit.is_tight:
        found = "a bound of -log p, but no denoiser reaches the entropy, as the objective says"
    elif not audit.is_tight:
        found = "a bound of -log p, but no denoiser reaches the entropy: terms count too much"
    else:
        found = "a bound of -log p, and tight on independent data"
    return found if audit.claims else f"{found}; the objective itself does not claim to be a bound"


def numbers(audit: Audit) -> dict[str, Any]:
    """Returns the verdict and the measurements for JSON."""
    measured = [
        {
            "symbols": result.problem.symbols,
            "length": result.problem.length,
            "enumerated": result.enumerated,
            "largest_log_sum": result.largest.value,
            "largest_log_sum_se": float(result.largest.error),
            "excess_nats": result.closest.value,
            "excess_nats_se": float(result.closest.error),
            "excess_nats_dependent": result.dependent,
        }
        for result in audit.results
    ]
    verdicts = {"claims": audit.claims, "bound": audit.is_bound, "tight": audit.is_tight}
    return {**verdicts, "passed": audit.passed, "problems": measured}


def _measured(result: Audited) -> list[str]:
    problem = result.problem
    draws = "all draws enumerated" if result.enumerated else "averaged over draws"
    return [
        f"V = {problem.symbols}, L = {problem.length}, {draws}, "
        f"{amount(result.tried, 'denoiser')}:",
        f"  largest log sum_x exp(-L(x))  {_with_error(result.largest)}, at most 0 for a bound",
        f"  independent uniform data      {_with_error(result.closest)} nats above the entropy, "
        "0 at best",
        f"  dependent data                {result.dependent:.6f} nats above the entropy, at best",
    ]


def _with_error(found: Found) -> str:
    return f"{found.value:.6f} +- {found.error:.6f}"


def _of_sum(result: Audited) -> list[str]:
    """Returns the lines of a counterexample to sum_x exp(-L(x)) <= 1."""
    found, problem = result.largest, result.problem
    said = (
        f"counterexample: {_which(problem, found.group)}, sum_x exp(-L(x)) = "
        f"{np.exp(found.value):.6f} is above 1, by more than {ERRORS:g} standard errors"
    )
    return [said, *_sequences(problem, found), *_outputs(problem, found)]


def _of_excess(result: Audited) -> list[str]:
    """Returns the lines with the best denoiser's cost of independent uniform data."""
    found, problem = result.closest, result.problem
    entropy = np.log(problem.sizes[found.group])
    said = (
        f"counterexample: {_which(problem, found.group)}, independent and uniform, L(x) should be "
        f"{entropy:.6f} nats. The best denoiser found pays {found.value + entropy:.6f} on average"
    )
    return [said, *_sequences(problem, found)]


def _which(problem: Problem, group: int) -> str:
    if group == 0:
        return f"x of {amount(problem.length, 'token')}, all counted"
    return f"x of {amount(problem.length, 'token')}, the first given as {group - 1} and not counted"


def _sequences(problem: Problem, found: Found) -> list[str]:
    rows = np.flatnonzero(problem.groups[found.group])
    lines = ["  x        L(x) in nats            exp(-L(x))"]
    for row in rows[:MOST]:
        x = " ".join(map(str, problem.batch.tokens[row]))
        nats, error = found.nats[row], found.errors[row]
        lines.append(f"  {x:<8} {nats:.6f} +- {error:.6f}   {np.exp(-nats):.6f}")
    return lines


def _outputs(problem: Problem, found: Found) -> list[str]:
    """Returns the lines with the denoiser's distributions at t = 1/2."""
    states = range(problem.symbols + 1)
    z = np.array(list(itertools.product(states, repeat=problem.length)), np.int32)
    with jax.enable_x64(True):
        denoiser = tabled(jnp.asarray(found.table), causal=problem.objective.needs.causal)
        mu = np.asarray(jax.nn.softmax(denoiser(jnp.asarray(z), jnp.full(len(z), 0.5)), axis=-1))
    lines = ["  softmax of the outputs of that denoiser at t = 1/2, position by position"]
    for state, rows in list(zip(z, mu, strict=True))[:MOST]:
        name = " ".join("m" if k == problem.symbols else str(k) for k in state)
        each = " | ".join(" ".join(f"{p:.3f}" for p in row) for row in rows)
        lines.append(f"  z = {name:<8} {each}")
    return lines
