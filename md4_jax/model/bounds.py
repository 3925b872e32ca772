"""Choice of the bound on -log p for the evaluation of a model."""

from typing import Any

from md4_jax.config.evaluators import named, tightest
from md4_jax.config.fit import Component, check_fit, check_order
from md4_jax.evals.likelihood import main_bound
from md4_jax.experiment import Experiment
from md4_jax.protocols import UserError


def chosen(experiment: Experiment, name: str) -> Any:
    """Returns the named objective, or that of --mode eval; UserError if it is not a bound."""
    if not name:
        main = main_bound(experiment)
        if main is not None:
            return main.objective
        return tightest("score", experiment.objective, experiment.process, experiment.network)
    found = named("objective", {"name": name}, experiment.objective)
    component = Component("objective", name, found)
    check_fit(experiment, component)
    check_order(experiment, component)
    if not found.is_bound(experiment.process):
        raise UserError(f"objective={name!r} is not a bound of -log p for this model")
    return found
