"""The evaluators of a config, as objects, each with the bound that it reports."""

from collections.abc import Mapping
from typing import Any

from md4_jax.config.schema import arguments_of, build_section
from md4_jax.evals import EVALUATORS
from md4_jax.objectives import OBJECTIVES
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.protocols import Needs, Network, Objective, UserError

# The bounds that `auto` chooses from: the first that the process and the network allow. Those of
# one process stand from the least noisy to the noisiest.
BOUNDS = (
    "autoregressive", "any_order", "genmd4", "uniform_elbo", "score_entropy", "ctmc", "d3pm",
)  # fmt: skip


def evaluators(
    config: Mapping[str, Any], objective: Objective, process: Any, network: Network
) -> dict[str, Any]:
    """Returns the evaluators by name; those with an `objective` get the bound that it names.

    They run in the order of the dict, which is that of EVALUATORS: n-gram models are printed
    beside the bound of the same text, which has to be there before them.
    """
    kinds = list(EVALUATORS)
    found = {}
    for name in sorted(config["evals"], key=lambda name: _place(config["evals"][name], kinds)):
        path, section = f"evals.{name}", config["evals"][name]
        supplied = {}
        if "objective" in arguments_of(path, section["name"]):
            asked = section.get("objective", {"name": "auto"})
            if asked["name"] == "auto":
                supplied["objective"] = tightest(path, objective, process, network)
            else:
                supplied["objective"] = build_section(f"{path}.objective", asked)
        found[name] = _made(path, section, supplied)
    return found


def _place(section: Mapping[str, Any], kinds: list[str]) -> int:
    """The place of an evaluator's kind; those of the user's own come last."""
    return kinds.index(section["name"]) if section["name"] in kinds else len(kinds)


def _made(path: str, section: Mapping[str, Any], supplied: Mapping[str, Any]) -> Any:
    """The evaluator, whose own complaints begin with the key in its section."""
    try:
        return build_section(path, section, **supplied)
    except UserError as error:
        said = str(error)
        raise UserError(said if said.startswith(path) else f"{path}.{said}") from error


def tightest(path: str, objective: Objective, process: Any, network: Network) -> Objective:
    """Returns the bound that `auto` stands for: the training objective itself where it is it.

    Block diffusion is evaluated by its own block, and a process for which no bound of this
    package is made by the training objective. UserError if that is no bound.
    """
    is_bound = isinstance(process, objective.needs.processes) and objective.is_bound(process)
    if isinstance(objective, BlockDiffusion):
        return objective if is_bound else BlockDiffusion(block=objective.block)
    for name in BOUNDS:
        if _suits(OBJECTIVES[name].needs, process, network):
            same = isinstance(objective, OBJECTIVES[name]) and is_bound
            return objective if same else OBJECTIVES[name]()
    if is_bound:
        return objective
    raise UserError(
        f"{path}.objective.name='auto' finds no bound of -log p for this process ({process}): name "
        f"an objective that is one, or take {path} out of evals"
    )


def _suits(needs: Needs, process: Any, network: Network) -> bool:
    """Whether a bound is defined for process and network; what else it needs is checked later."""
    own = getattr(process, "parametrisation", None)
    allowed = needs.parametrisations is None or own is None or own in needs.parametrisations
    return isinstance(process, needs.processes) and needs.causal == network.causal and allowed
