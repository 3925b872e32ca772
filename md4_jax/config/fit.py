"""Checks that the `needs` of an objective or a sampler match the process and the network."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from md4_jax.config.schema import REGISTRIES
from md4_jax.experiment import Experiment, sample_block
from md4_jax.networks.ordered import FITTING as ORDERED
from md4_jax.processes.capabilities import RevealsParts
from md4_jax.processes.lengths import ResizesMasks
from md4_jax.protocols import Network, UserError

# Keys of a network that works block by block, and the reasons against other values.
BLOCKWISE = {"local_width": 0, "tables": 0, "causal": False, "gaps": False}
REASONS = {
    "local_width": "a convolution would cross the borders of blocks",
    "tables": "tables would cross the borders of blocks",
    "causal": "a causal mask would cut blocks",
    "gaps": "texts that grow have no blocks",
}


class Component(NamedTuple):
    """Objective or sampler to compare with process and network: config key, name and object."""

    key: str
    name: str
    value: Any


def objective_name(objective: Any) -> str:
    """Returns the name of an objective in a config, also if `auto` selected it."""
    names = {cls: name for name, cls in REGISTRIES["objective"].items()}
    kind = type(objective)
    return names.get(kind, f"{kind.__module__}:{kind.__qualname__}")


def check_fit(experiment: Experiment, part: Component) -> None:
    """Raises UserError if an objective or the sampler does not fit the process or network."""
    check_process(experiment.process, experiment.config["process"]["name"], part)
    network, needs, said = experiment.network, part.value.needs, f"{part.key}.name={part.name!r}"
    _check_kind(experiment, needs.classifies, said)
    if needs.time and network.time_free:
        raise UserError(f"{said} needs network.time_conditioning=True: {needs.why}")
    if needs.causal != network.causal:
        raise UserError(
            f"{said} needs network.causal={needs.causal}: "
            + (
                "it predicts each token from those before it"
                if needs.causal
                else "it predicts each token from those on both sides"
            )
        )
    _check_blocks(experiment, part)
    if needs.mixtures and not network.mixtures:
        raise UserError(
            f"{said} needs network.name='transformer' and network.tables=0, because the inputs of "
            "the network are mixtures of symbols"
        )
    if needs.swapped and not network.swapped:
        raise UserError(
            f"{said} needs network.name='partition': it predicts two groups of tokens, each from "
            "the other, in one pass"
        )
    if needs.ordered and not (network.ordered and network.time_free):
        raise UserError(f"{said} needs {in_order(experiment.config['network'])}")
    _check_drafts(experiment, part)
    _check_outputs(network, part)
    _check_resizing(experiment, part)
    if needs.edits != network.edits:
        raise UserError(
            f"{said} needs network.edits={needs.edits}"
            + (
                " and network.gaps=True: the network must predict which masks are deleted"
                if needs.edits
                else ": no mask is deleted"
            )
        )
    if needs.gaps != network.gaps:
        raise UserError(
            f"{said} needs network.gaps={needs.gaps}"
            + (
                " and network.name='transformer': the network must predict how many tokens are "
                "missing"
                if needs.gaps
                else ": its texts do not grow, and nothing is missing"
            )
        )


def _check_outputs(network: Network, part: Component) -> None:
    """Raises UserError for a network without something that it must read or predict."""
    needs, said = part.value.needs, f"{part.key}.name={part.name!r}"
    if needs.recalls and not network.recalls:
        raise UserError(
            f"{said} with {part.key}.self_conditioning above 0 needs "
            "network.name='diffusion_gemma': a network that reads what it has predicted"
        )
    if needs.reads and not network.reads:
        raise UserError(
            f"{said} with {part.key}.left_to_right above 0 needs network.causal_context=True, or "
            "network.name='diffusion_gemma': a network that reads clean texts from left to right"
        )
    if needs.quality and not network.quality:
        raise UserError(
            f"{said} needs network.quality=True: the network must predict which tokens are right"
        )


def _check_drafts(experiment: Experiment, part: Component) -> None:
    """Raises UserError for drafts of a network without a causal context or windows."""
    context = experiment.config["network"].get("causal_context", False)
    if part.value.needs.verifies and not (context or experiment.objective.needs.windows):
        raise UserError(
            f"{part.key}.name={part.name!r} needs a network that reads clean tokens from left to "
            "right and can predict several masks after them: network.causal_context=True with "
            "objective.name='block', or objective.name='sdlm'"
        )


def _check_blocks(experiment: Experiment, part: Component) -> None:
    """Raises UserError if only one of network and objective works block by block.

    Without blocks the encoder of a network is not used.
    """
    network, section = experiment.network, experiment.config["network"]
    needed, said = part.value.needs.blockwise, f"{part.key}.name={part.name!r}"
    if needed and not network.blockwise:
        raise UserError(f"{said} needs {whole_blocks(section)}")
    if network.encodes and not needed and part.key != "sample":
        own = hasattr(part.value, "block")
        fits = f"set {part.key}.block above 0" if own else f"take {part.key}.name='block'"
        raise UserError(
            f"{said} gives the network whole texts, but the encoder of "
            f"network.name={section['name']!r} reads the clean blocks before a noisy one: {fits}"
        )


def _check_kind(experiment: Experiment, classifies: bool, said: str) -> None:
    """Raises UserError for a classifier with a token objective, and vice versa."""
    if classifies == experiment.network.classifies:
        return
    needed = "a network that predicts tokens"
    if classifies:
        needed = "network.name='classifier' or, of images, 'dit_classifier'"
    own = experiment.config["network"]["name"]
    raise UserError(f"{said} needs {needed}, not network.name={own!r}")


def check_order(experiment: Experiment, part: Component) -> None:
    """Raises UserError if a sampler or bound uses the network differently from its training.

    A network that was trained on tokens in an order makes no useful predictions from whole texts,
    and vice versa. One that was trained on windows makes none in other orders.
    """
    trained = experiment.objective.needs.ordered
    own, needs = experiment.objective.needs, part.value.needs
    if needs.verifies:
        return  # `check_fit` has checked the network
    if (needs.ordered, needs.windows) == (trained, own.windows):
        return
    said = f"{part.key}.name={part.name!r}"
    if needs.windows or own.windows:
        fits = "'longest_prefix' or 'self_speculative'" if part.key == "sample" else "'sdlm'"
        fits = f"{part.key}.name={fits}"
        raise UserError(
            f"{said} does not fit objective.name={objective_name(experiment.objective)!r}: only "
            f"objective.name='sdlm' trains a network on windows of masks, for {fits}"
        )
    own = objective_name(experiment.objective)
    fits = "'eso' or 'streaming'" if part.key == "sample" else "'eso_orders' or 'auto'"
    if trained:
        raise UserError(
            f"{said} evaluates the network on whole texts, but objective.name={own!r} trains it "
            f"on tokens in a random order: set {part.key}.name={fits}"
        )
    raise UserError(
        f"{said} evaluates the network on tokens in a random order, but objective.name={own!r} "
        "trains it on whole texts: train with objective.name='eso' or 'wedlm'"
    )


def _check_resizing(experiment: Experiment, part: Component) -> None:
    """Raises UserError if only one of a sampler and a process changes the length of texts.

    A bound generates nothing, so it may use such a process at a fixed length.
    """
    network, said = experiment.network, f"{part.key}.name={part.name!r}"
    if not part.value.needs.hides:
        if part.key == "sample" and isinstance(experiment.process, ResizesMasks):
            raise UserError(
                f"{said} would draw the symbols that change the length of a text as if they were "
                f"tokens: process.name={experiment.config['process']['name']!r} needs "
                "sample.name='resize'"
            )
        return
    if not (network.hides and network.time_free):
        raise UserError(
            f"{said} needs network.name='transformer', 'modernbert' or 'lfm2', with "
            "network.time_conditioning=False, network.causal=False, network.tables=0 and "
            "network.gaps=False: the network does not attend to the padding after a text, and "
            "the final length of the text is unknown, so that the time is unknown too"
        )


def check_parts(experiment: Experiment) -> None:
    """Raises UserError if the network does not read the sub-tokens that the process hides."""
    process, read = experiment.process, experiment.network.parts
    hidden = process.parts if isinstance(process, RevealsParts) else 0
    if hidden == read:
        return
    sections = (experiment.config["process"], experiment.config["network"])
    own, other = (
        f"name={section['name']!r}" + (f" with parts={parts}" if parts else "")
        for section, parts in zip(sections, (hidden, read), strict=True)
    )
    raise UserError(
        f"process.{own} does not fit network.{other}: process.name='partial_masking' needs "
        "network.name='sub_tokens', and the other way round, with process.parts and network.parts "
        "equal"
    )


def check_dropout(experiment: Experiment) -> None:
    """Raises UserError for dropout of attention weights that the objective's attention lacks."""
    rate = experiment.config["network"].get("attention_dropout", 0.0)
    needs, name = experiment.objective.needs, experiment.config["objective"]["name"]
    if rate and (needs.blockwise or needs.ordered):
        how = "block by block" if needs.blockwise else "in an order"
        raise UserError(
            f"network.attention_dropout={rate} must be 0 with objective.name={name!r}: the network "
            f"reads texts {how}, and this attention has no dropout. Use network.dropout"
        )


def check_whole(experiment: Experiment, said: str, leave: str) -> None:
    """Raises UserError for a model trained block by block; sample.block=0 does not change that."""
    block = sample_block(experiment)
    if block and not experiment.sample.block:
        raise UserError(
            f"{said} needs samples that are drawn as a whole, but this model was trained on "
            f"blocks (objective.block={block}): set {leave}"
        )


def whole_blocks(network: Mapping[str, Any]) -> str:
    """Returns the config changes that a network block by block needs, with the reason."""
    wrong = [key for key, fits in BLOCKWISE.items() if network.get(key, fits) != fits]
    if not wrong:
        return "a network that can work block by block, such as network.name='transformer'"
    asked = [f"network.{key}={BLOCKWISE[key]}, not {network[key]}" for key in wrong]
    return f"{' and '.join(asked)}: {', and '.join(REASONS[key] for key in wrong)}"


def in_order(network: Mapping[str, Any]) -> str:
    """Returns the config changes that a network needs to read tokens in an order."""
    fitting = {"time_conditioning": False, **ORDERED}
    wrong = [key for key, fits in fitting.items() if (network.get(key) or fits) != fits]
    asked = [f"network.{key}={fitting[key]!r}, not {network[key]!r}" for key in wrong]
    return (
        f"{' and '.join(asked or ['network.name=transformer'])}: the network reads tokens in any "
        "order and has no time input (or has process.conditioning='zero')"
    )


def check_process(process: Any, name: str, part: Component) -> None:
    """Raises UserError if an objective or the sampler does not fit the process of that name."""
    needs, said = part.value.needs, f"{part.key}.name={part.name!r}"
    if not isinstance(process, needs.processes):
        fits = " or ".join(map(repr, _satisfying(part)))
        raise UserError(f"{said} needs process.name={fits}, not {name!r}")
    allowed = needs.parametrisations
    # Some processes have no parametrisation.
    own = getattr(process, "parametrisation", None)
    if None not in (allowed, own) and own not in allowed:
        fits = " or ".join(repr(option) for option in allowed)
        raise UserError(f"{said} needs process.parametrisation={fits}, not {own!r}: {needs.why}")


def _satisfying(part: Component) -> list[str]:
    """Returns the names of registered processes that an objective or a sampler supports.

    Processes that resize texts of masks are supported only by their own sampler.
    """
    needs = part.value.needs
    samples = part.key == "sample" and not needs.hides
    made = {name: make(vocab_size=2) for name, make in REGISTRIES["process"].items()}
    return [
        name
        for name, process in made.items()
        if isinstance(process, needs.processes)
        if not (samples and isinstance(process, ResizesMasks))
    ]
