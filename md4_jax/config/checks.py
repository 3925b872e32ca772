"""Every check that spans sections of a config, in the user's words."""

import dataclasses

from md4_jax.config.schema import REGISTRIES
from md4_jax.experiment import Experiment, eval_batch_size, sample_block, sample_length, templates
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import batch_shards
from md4_jax.samplers.transforms import Transform


def validate(experiment: Experiment) -> None:
    """UserError, with the numbers, for sections that do not go together."""
    shards = batch_shards(experiment.mesh)
    parts = experiment.train.microbatches * shards
    mesh = "x".join(str(size) for size in experiment.mesh.shape.values())
    if experiment.train.batch_size % parts:
        raise UserError(
            f"train.batch_size={experiment.train.batch_size} must be divisible by "
            f"train.microbatches={experiment.train.microbatches} times the {shards} batch shards "
            f"of the mesh {mesh} (data x fsdp x tensor), which is {parts}"
        )
    if eval_batch_size(experiment) % shards:
        raise UserError(
            f"eval.batch_size={eval_batch_size(experiment)} must be divisible by the {shards} "
            f"batch shards of the mesh {mesh} (data x fsdp x tensor)"
        )
    _check_fit(experiment)
    if not experiment.eval_objective.is_bound(experiment.process):
        raise UserError(
            f"eval.objective.name={_names(experiment)['eval.objective']!r} is not a bound of "
            f"-log p with this process ({experiment.process}), so it cannot be reported as a "
            "likelihood; any_order (weight_power=1) is one for every schedule"
        )
    if experiment.data.separate_documents and experiment.tokenizer.eot_id is None:
        raise UserError(
            "data.separate_documents=True needs a tokenizer with an end-of-text token; "
            f"{experiment.config['tokenizer']['name']!r} has none"
        )


def _names(experiment: Experiment) -> dict[str, str]:
    """Section -> what is in it by its name in a config, `auto` resolved."""
    bounds = {cls: name for name, cls in REGISTRIES["objective"].items()}
    return {
        "objective": experiment.config["objective"]["name"],
        "eval.objective": bounds[type(experiment.eval_objective)],
        "sample": experiment.config["sample"]["name"],
    }


def _check_fit(experiment: Experiment) -> None:
    """UserError for an objective or a sampler that is not defined for the process."""
    chosen = experiment.config["process"]["name"]
    network = experiment.network
    users = {
        "objective": experiment.objective,
        "eval.objective": experiment.eval_objective,
        "sample": experiment.sampler_step,
    }
    for section, name in _names(experiment).items():
        key, user = f"{section}.name", users[section]
        needs = user.needs
        if not isinstance(experiment.process, needs.processes):
            fits = " or ".join(map(repr, _able(needs.processes)))
            raise UserError(f"{key}={name!r} needs process.name={fits}, not {chosen!r}")
        if needs.time and network.time_free:
            raise UserError(f"{key}={name!r} needs network.time_conditioning=True: {needs.why}")
        if needs.causal != network.causal:
            raise UserError(
                f"{key}={name!r} needs network.causal={needs.causal}: "
                + (
                    "it predicts each token from those before it"
                    if needs.causal
                    else "it predicts each token from those on both sides"
                )
            )
        if needs.blockwise and not network.blockwise:
            raise UserError(
                f"{key}={name!r} needs network.local_width=0 and network.causal=False, which a "
                "border between blocks would cut"
            )
        allowed = needs.parametrisations
        # A process without one leaves nothing to choose.
        own = getattr(experiment.process, "parametrisation", None)
        if None not in (allowed, own) and own not in allowed:
            fits = " or ".join(repr(option) for option in allowed)
            raise UserError(
                f"{key}={name!r} needs process.parametrisation={fits}, not {own!r}: {needs.why}"
            )
    _check_steps(experiment)
    _check_sampling(experiment)


def _able(protocols: tuple[type, ...]) -> list[str]:
    """The names of the processes in the registry that have one of these protocols."""
    made = {name: make(vocab_size=2) for name, make in REGISTRIES["process"].items()}
    return [name for name, process in made.items() if isinstance(process, protocols)]


def _check_sampling(experiment: Experiment) -> None:
    """UserError for sampling settings that do not go together."""
    transform, plain = experiment.sampler_step.transform, Transform()
    for key, value in dataclasses.asdict(transform).items():
        if (
            value != getattr(plain, key)
            and getattr(experiment.process, "parametrisation", "") == "score"
        ):
            raise UserError(
                f"sample.{key}={value} needs a distribution over symbols, and with "
                "process.parametrisation='score' the network gives ratios"
            )
    _check_blocks(experiment)
    _check_stride(experiment)
    if experiment.sample.stride >= experiment.data.length:
        raise UserError(
            f"sample.stride={experiment.sample.stride} must be less than data.length="
            f"{experiment.data.length}, the window that it moves"
        )
    templates(experiment)


def _check_blocks(experiment: Experiment) -> None:
    """UserError for text that cannot be sampled block by block as it is asked for."""
    options, block = experiment.sample, sample_block(experiment)
    if not block:
        for key in ("memory", "stop", "min_entropy"):
            if getattr(options, key):
                raise UserError(
                    f"sample.{key}={getattr(options, key)} is for text that is sampled block by "
                    "block: give sample.block too"
                )
        return
    window = options.memory or experiment.data.length
    for key, size in (("sample.length", sample_length(experiment)), ("sample.memory", window)):
        if size % block:
            raise UserError(f"sample.block={block} must divide {key}={size}")
    if not (isinstance(experiment.process, RevealsMasks) and experiment.network.blockwise):
        raise UserError(
            f"sample.block={block} needs process.name='masking', network.local_width=0 and "
            "network.causal=False"
        )
    if options.stride:
        raise UserError(
            f"sample.stride={options.stride} moves a window over a text that is sampled at once; "
            f"with sample.block={block} every block sees the sample.memory={window} tokens before"
        )
    if options.judge and (options.stop or options.min_entropy):
        raise UserError(
            f"sample.judge={options.judge!r} needs texts of one length, and sample.stop="
            f"{options.stop!r} with sample.min_entropy={options.min_entropy} ends some before"
        )
    if options.min_entropy and window > sample_length(experiment):
        raise UserError(
            f"sample.min_entropy={options.min_entropy} is of the last sample.memory={window} "
            f"tokens, more than a text has: sample.length={sample_length(experiment)}"
        )
    if options.stop and experiment.tokenizer.eot_id is None:
        raise UserError(
            "sample.stop='end_of_text' needs a tokenizer with an end-of-text token; "
            f"{experiment.config['tokenizer']['name']!r} has none"
        )


def _check_stride(experiment: Experiment) -> None:
    """UserError for an evaluation that cannot slide over the text as it is asked to."""
    stride, length, bound = (
        experiment.eval.stride,
        experiment.data.length,
        experiment.eval_objective,
    )
    if not stride:
        return
    if stride > length:
        raise UserError(f"eval.stride={stride} must be at most data.length={length}")
    block = getattr(bound, "block", 1)
    if (length - stride) % block:
        raise UserError(
            f"eval.stride={stride} leaves data.length={length} - {stride} tokens before each "
            f"sequence, which eval.objective.block={block} must divide"
        )


def _check_steps(experiment: Experiment) -> None:
    """UserError where the process has its own steps, and an objective or the sampler others."""
    for user in (experiment.objective, experiment.eval_objective, experiment.sampler_step):
        if hasattr(user, "check"):
            user.check(experiment.process)
        if hasattr(user, "check_length"):
            user.check_length(experiment.data.length)
    own, sample = experiment.process.timesteps, experiment.sample
    if own is not None and (sample.steps, sample.grid) != (own, "uniform"):
        raise UserError(
            f"sample.steps={sample.steps} and sample.grid={sample.grid!r} must be {own} and "
            f"'uniform': the process has process.timesteps={own} steps and a matrix for each"
        )
