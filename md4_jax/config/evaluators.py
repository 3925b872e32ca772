"""Builds the evaluators of a config and selects the bounds that they report."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from md4_jax.config.load import unknown
from md4_jax.config.mistakes import all_of
from md4_jax.config.schema import arguments_of, build_section
from md4_jax.data.sequences import SplitSize
from md4_jax.data.tokenizer_base import UnknownCharacter
from md4_jax.evals import EVALUATORS
from md4_jax.evals.suite import Suite
from md4_jax.objectives import OBJECTIVES
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.eso import Eso, EsoOrders
from md4_jax.objectives.every_order import EveryOrder
from md4_jax.objectives.sdlm import SDLM
from md4_jax.objectives.wedlm import WeDLM
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Needs, Network, Objective, UserError

# `auto` selects the first of these bounds that the process and the network support. Bounds of
# the same process are ordered by the variance of their estimates, smallest first.
BOUNDS = (
    "autoregressive", "any_order", "genmd4", "uniform_elbo", "score_entropy", "ctmc", "gidd",
    "d3pm", "flexmdm", "edit_flow", "masked_edit_flow",
    "candi", "prime",
)  # fmt: skip
# Keys of the training objective that other sections inherit unless they set them: the block size
# of samples, that of an objective in an order, and the fraction of tokens that diffusion generates.
TRAINED = ("block", "block_size", "alpha_0")
OWN_KEY = re.compile(r"(?<![\w.])objective\.(\w+)")


def evaluators(
    config: Mapping[str, Any], objective: Objective, process: Any, network: Network
) -> dict[str, Any]:
    """Builds the evaluators by name; those with an `objective` get the bound that it names.

    They run in the order of the dict: that of EVALUATORS, then the user's own kinds. N-gram models
    therefore run after the bound on the same text, which is printed beside them.
    """
    order = {kind: number for number, kind in enumerate(EVALUATORS)}
    sections = sorted(
        config["evals"].items(), key=lambda item: order.get(item[1]["name"], len(order))
    )
    made = all_of(*(partial(_evaluator, *item, objective, process, network) for item in sections))
    return {name: evaluator for (name, _), evaluator in zip(sections, made, strict=True)}


def with_kinds(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Adds evaluators that are given only by their kind, with its default options."""
    kinds = {name: {"name": name} for name in names if name in EVALUATORS}
    return {**config, "evals": {**kinds, **config["evals"]}}


def unknown_evaluator(name: str, there: list[str]) -> UserError:
    """Makes the error for a name that is neither an evaluator of the config nor a known kind."""
    error = unknown("evaluator in --evals", name, list({*there, *EVALUATORS}))
    return UserError(
        f"{error}. The evaluators of the config are {', '.join(there)}. The other names are kinds "
        "of evaluators"
    )


def _evaluator(
    name: str, section: Mapping[str, Any], objective: Objective, process: Any, network: Network
) -> Any:
    """Builds an evaluator, with the bound of its section if it reports one."""
    path, supplied = f"evals.{name}", {}
    if "objective" in arguments_of(path, section["name"]):
        asked = section.get("objective", {"name": "auto"})
        if asked["name"] == "auto":
            supplied["objective"] = tightest(path, objective, process, network)
        else:
            with with_keys_of(name, {name: section}):
                supplied["objective"] = named(f"{path}.objective", asked, objective)
    return _made(path, section, supplied)


def readers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the evaluators that read data, by name, to open their data. They have no bounds.

    Evaluators with their own data sets are omitted if they run neither during nor after training.
    """
    found = {}
    for name, section in config["evals"].items():
        path, own = f"evals.{name}", {k: v for k, v in section.items() if k != "objective"}
        has_bound = "objective" in arguments_of(path, section["name"])
        evaluator = _made(path, own, {"objective": None} if has_bound else {})
        if evaluator.needs_data or evaluator.every or evaluator.final:
            found[name] = evaluator
    return found


def sizes_of_all(suite: Suite, names: Iterable[str]) -> dict[tuple[str, str], SplitSize]:
    """Returns the result of `suite.sizes`; one UserError for all evaluators with missing data.

    Only the first unknown character is described, since the same characters may be in many texts.
    """
    unknown_in: dict[str, UserError] = {}

    def sizes_of(name: str) -> dict[tuple[str, str], SplitSize]:
        try:
            return suite.sizes([name])
        except UserError as error:
            if not _is_of_character(error):
                raise
            unknown_in[name] = error
            return {}

    each = all_of(
        *(partial(sizes_of, name) for name in names), partial(_check_characters, unknown_in)
    )
    return {split: size for sizes in each for split, size in sizes.items()}


def _check_characters(unknown_in: Mapping[str, UserError]) -> dict[Any, Any]:
    """Raises UserError for the first text with an unknown character; it names the other texts."""
    if unknown_in:
        _, *others = [f"evals.{name}" for name in unknown_in]
        error = next(iter(unknown_in.values()))
        also = f". Unknown characters are also in the texts of {', '.join(others)}" * bool(others)
        raise UserError(f"{error}{also}") from error
    return {}


def _is_of_character(error: BaseException | None) -> bool:
    """Returns whether an error was raised because of an unknown character."""
    if error is None:
        return False
    return isinstance(error, UnknownCharacter) or _is_of_character(error.__cause__)


def _made(path: str, section: Mapping[str, Any], supplied: Mapping[str, Any]) -> Any:
    """Builds an evaluator; its error messages begin with the full key."""
    try:
        return build_section(path, section, **supplied)
    except UserError as error:
        said = str(error)
        raise UserError(said if said.startswith(path) else f"{path}.{said}") from error


def named(path: str, asked: Mapping[str, Any], objective: Objective) -> Objective:
    """Builds the bound of a section, for a model trained with `objective`.

    The block size, and the fraction of diffusion of Eso-LM, default to those of training: a model
    that samples blocks of 8 has no likelihood by blocks of 4. Other options default to those of
    `for_evaluation`, which may also be of another class.
    """
    asked = {**trained_options(OBJECTIVES.get(asked["name"]), objective), **asked}
    found = build_section(path, asked)
    if not hasattr(found, "for_evaluation"):
        return found
    quieter = found.for_evaluation()
    if not isinstance(quieter, type(found)):
        return quieter
    return build_section(path, vars(quieter) | asked)


def tightest(path: str, objective: Objective, process: Any, network: Network) -> Objective:
    """Returns the bound that `auto` selects; the training objective if it has the same class.

    An objective with `for_evaluation` is replaced by it: the bound of the same model with the
    smallest variance, even if the loss itself is not a bound. Bounds by blocks use the block size
    of training, and `every_order` and `eso_orders` keep their options. A process without an entry
    in BOUNDS is evaluated with the training objective; UserError if that is not a bound.
    """
    is_bound = isinstance(process, objective.needs.processes) and objective.is_bound(process)
    if isinstance(objective, BlockDiffusion):
        return objective.for_evaluation()
    if isinstance(objective, EveryOrder | EsoOrders):
        return objective
    if isinstance(objective, Eso | WeDLM | SDLM):  # no other bound reads tokens in an order
        return objective.for_evaluation()
    block = getattr(objective, "block", 0)
    if block and isinstance(process, RevealsMasks):  # the network saw no whole text of masks
        return BlockDiffusion(block).for_evaluation()
    for name in BOUNDS:
        kind = OBJECTIVES[name]
        if _suits(kind().needs, process, network):
            bounds = is_bound or hasattr(objective, "for_evaluation")
            same = isinstance(objective, kind) and bounds
            chosen = objective if same else kind(**trained_options(kind, objective))
            return chosen.for_evaluation() if hasattr(chosen, "for_evaluation") else chosen
    if is_bound:
        return objective
    raise UserError(
        f"{path}.objective.name='auto' found no objective that is a bound of -log p with this "
        f"process ({process}): set {path}.objective.name to one, or remove {path}"
    )


def trained_options(kind: Any, objective: Objective) -> dict[str, Any]:
    """Returns the options of TRAINED that a bound or a sampler of this class inherits."""
    block, share = getattr(objective, "block", 0), getattr(objective, "alpha_0", None)
    size = getattr(objective, "block_size", None)
    found = {"block": block or None, "block_size": size, "alpha_0": share}
    own = {x.name for x in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else ()
    return {key: found[key] for key in TRAINED if found[key] is not None and key in own}


@contextlib.contextmanager
def with_keys_of(evaluation: str, evals: Mapping[str, Any]) -> Iterator[None]:
    """Makes errors about an evaluator's objective name the keys of evals.EVALUATION.objective.

    evaluation  name of the evaluator; '' for the training objective
    evals       sections by name

    The messages of an objective name its keys objective.KEY. They remain so if the value comes from
    training: if the section names no objective, and for keys of `TRAINED` that it does not set.
    """
    section = evals.get(evaluation, {}).get("objective", {})

    def own(match: re.Match) -> str:
        of_training = match[1] in TRAINED and match[1] not in section
        return match[0] if of_training else f"evals.{evaluation}.{match[0]}"

    try:
        yield
    except UserError as error:
        if section.get("name", "auto") == "auto":
            raise
        raise UserError(OWN_KEY.sub(own, str(error))) from error


def _suits(needs: Needs, process: Any, network: Network) -> bool:
    """Returns whether a bound is defined for the process and compatible with network.causal."""
    own = getattr(process, "parametrisation", None)
    allowed = needs.parametrisations is None or own is None or own in needs.parametrisations
    return isinstance(process, needs.processes) and needs.causal == network.causal and allowed
