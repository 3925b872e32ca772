"""The composition root: a config -> an experiment, and every check that spans sections."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from md4_jax.checkpoint import CheckpointOptions
from md4_jax.config import parse, unknown
from md4_jax.evaluate import EvalOptions, Evaluator
from md4_jax.experiment import (
    Experiment,
    eval_batch_size,
    sample_block,
    sample_length,
    templates,
)
from md4_jax.metrics import LogOptions
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.processes.masking import Masking
from md4_jax.prompts import PromptOptions
from md4_jax.protocols import Objective, UserError
from md4_jax.sample import SampleOptions
from md4_jax.samplers import GRIDS, loop
from md4_jax.samplers.blocks import sample_blocks
from md4_jax.samplers.grids import listed
from md4_jax.samplers.transforms import Transform, check_transform
from md4_jax.sections import REGISTRIES, BenchOptions, DataOptions, PlanOptions, fields, make
from md4_jax.sharding import MeshOptions, batch_shards, make_mesh
from md4_jax.step import TrainOptions, make_eval_step


def experiment(config: dict[str, Any], tokenizer: Any, devices: list | None = None) -> Experiment:
    """Builds and checks everything but the data, for these devices or all that there are."""
    train = fields(TrainOptions, config["train"])
    sample = fields(SampleOptions, config["sample"])
    data = fields(DataOptions, config["data"])
    mesh = make_mesh(fields(MeshOptions, config["mesh"]), devices)
    network = make("network", config["network"], vocab_size=tokenizer.vocab_size)
    optimizer, rate = make("optim", config["optim"]).build(train.num_steps)
    prompt = fields(PromptOptions, config["sample"])
    transform = fields(Transform, config["sample"])
    check_transform(transform.temperature, transform.top_k, transform.top_p)
    process = make("process", config["process"], vocab_size=tokenizer.vocab_size)
    objective = make("objective", config["objective"])
    built = Experiment(
        config=config,
        tokenizer=tokenizer,
        network=network.build(mesh.devices.flat[0].platform),
        process=process,
        objective=objective,
        eval_objective=_eval_objective(config, objective, process),
        optimizer=optimizer,
        learning_rate=rate,
        sampler_step=make("sample", config["sample"], transform=transform),
        loop=_loop(objective, sample, data, tokenizer),
        grid=_grid(sample),
        mesh=mesh,
        data=data,
        train=train,
        eval=fields(EvalOptions, config["eval"]),
        sample=sample,
        prompt=prompt,
        checkpoint=fields(CheckpointOptions, config["checkpoint"]),
        log=fields(LogOptions, config["log"]),
        bench=fields(BenchOptions, config["bench"]),
        plan=fields(PlanOptions, config["plan"]),
    )
    validate(built)
    return built


def _grid(sample: SampleOptions) -> np.ndarray:
    """The named grid of so many steps, or the user's own times."""
    times = sample.grid
    if isinstance(times, str):
        if times in GRIDS:
            return GRIDS[times](sample.steps)
        if not times.startswith(("[", "(")):
            raise unknown("sample.grid", times, [*GRIDS, "[1.0, ..., 0.0]"])
        times = parse(times, None)
    if not isinstance(times, list | tuple) or not all(isinstance(t, int | float) for t in times):
        raise UserError(
            f"sample.grid={sample.grid} is not a list of numbers; one looks like [1.0, 0.5, 0.0]"
        )
    return listed(times)


# The bound that `auto` reports for a process: of those that are one, the least noisy.
BOUNDS = {
    "masking": "any_order",
    "state_dependent": "genmd4",
    "uniform": "uniform_elbo",
    "transition": "d3pm",
    "rates": "ctmc",
}


def _loop(objective: Objective, sample: SampleOptions, data: DataOptions, tokenizer: Any):
    """What runs the sampler's steps: over all of a text, or block by block."""
    block = sample.block or getattr(objective, "block", 0)
    if not block:
        return loop.sample
    stop = tokenizer.eot_id if sample.stop else None
    return functools.partial(
        sample_blocks, block=block, window=sample.memory or data.length,
        stop=stop, cached=sample.cached,
    )  # fmt: skip


def reported(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of the bound that is reported, with `auto` resolved."""
    section, process = config["eval"]["objective"], config["process"]
    if section["name"] != "auto":
        return section
    name = BOUNDS[process["name"]]
    if config["objective"]["name"] == "block":
        return {"name": "block", "block": config["objective"].get("block", BlockDiffusion.block)}
    if config["network"].get("causal"):
        name = "autoregressive"
    elif process.get("parametrisation") == "score":
        name = "score_entropy"
    return {"name": name}


def _eval_objective(config: Mapping[str, Any], objective: Objective, process: Any) -> Objective:
    """The reported bound: with `auto`, the training objective itself where it is that bound."""
    section = reported(config)
    automatic = config["eval"]["objective"]["name"] == "auto"
    same = section["name"] == config["objective"]["name"]
    fits = isinstance(process, objective.needs.processes) and objective.is_bound(process)
    if automatic and same and fits:
        return objective
    return make("eval.objective", section)


def validate(built: Experiment) -> None:
    """UserError, with the numbers, for sections that do not go together."""
    shards = batch_shards(built.mesh)
    parts = built.train.microbatches * shards
    mesh = "x".join(str(size) for size in built.mesh.shape.values())
    if built.train.batch_size % parts:
        raise UserError(
            f"train.batch_size={built.train.batch_size} must be divisible by "
            f"train.microbatches={built.train.microbatches} times the {shards} batch shards of "
            f"the mesh {mesh} (data x fsdp x tensor), which is {parts}"
        )
    if eval_batch_size(built) % shards:
        raise UserError(
            f"eval.batch_size={eval_batch_size(built)} must be divisible by the {shards} batch "
            f"shards of the mesh {mesh} (data x fsdp x tensor)"
        )
    _check_fit(built)
    if not built.eval_objective.is_bound(built.process):
        raise UserError(
            f"eval.objective.name={reported(built.config)['name']!r} is not a bound of "
            f"-log p with this process ({built.process}), so it cannot be reported as a "
            "likelihood; any_order (weight_power=1) is one for every schedule"
        )
    if built.data.separate_documents and built.tokenizer.eot_id is None:
        raise UserError(
            "data.separate_documents=True needs a tokenizer with an end-of-text token; "
            f"{built.config['tokenizer']['name']!r} has none"
        )


def _check_fit(built: Experiment) -> None:
    """UserError for an objective or a sampler that is not defined for the process."""
    names = {cls: name for name, cls in REGISTRIES["process"].items()}
    chosen = built.config["process"]["name"]
    network = built.network
    for key, user in (
        ("objective.name", built.objective),
        ("eval.objective.name", built.eval_objective),
        ("sample.name", built.sampler_step),
    ):
        name = reported(built.config)["name"]
        if not key.startswith("eval."):
            name = built.config[key.split(".")[0]]["name"]
        needs = user.needs
        if not isinstance(built.process, needs.processes):
            fits = " or ".join(repr(names[cls]) for cls in needs.processes)
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
        own = getattr(built.process, "parametrisation", None)
        if None not in (allowed, own) and own not in allowed:
            fits = " or ".join(repr(option) for option in allowed)
            raise UserError(
                f"{key}={name!r} needs process.parametrisation={fits}, not {own!r}: {needs.why}"
            )
    _check_steps(built)
    _check_sampling(built)


def _check_sampling(built: Experiment) -> None:
    """UserError for sampling settings that do not go together."""
    transform, plain = built.sampler_step.transform, Transform()
    for key, value in dataclasses.asdict(transform).items():
        if (
            value != getattr(plain, key)
            and getattr(built.process, "parametrisation", "") == "score"
        ):
            raise UserError(
                f"sample.{key}={value} needs a distribution over symbols, and with "
                "process.parametrisation='score' the network gives ratios"
            )
    _check_blocks(built)
    if built.sample.stride >= built.data.length:
        raise UserError(
            f"sample.stride={built.sample.stride} must be less than data.length="
            f"{built.data.length}, the window that it moves"
        )
    templates(built)


def _check_blocks(built: Experiment) -> None:
    """UserError for text that cannot be sampled block by block as it is asked for."""
    options, block = built.sample, sample_block(built)
    if not block:
        for key in ("memory", "stop"):
            if getattr(options, key):
                raise UserError(
                    f"sample.{key}={getattr(options, key)} is for text that is sampled block by "
                    "block: give sample.block too"
                )
        return
    window = options.memory or built.data.length
    for key, size in (("sample.length", sample_length(built)), ("sample.memory", window)):
        if size % block:
            raise UserError(f"sample.block={block} must divide {key}={size}")
    if not (isinstance(built.process, Masking) and built.network.blockwise):
        raise UserError(
            f"sample.block={block} needs process.name='masking', network.local_width=0 and "
            "network.causal=False"
        )
    if options.stride:
        raise UserError(
            f"sample.stride={options.stride} moves a window over a text that is sampled at once; "
            f"with sample.block={block} every block sees the sample.memory={window} tokens before"
        )
    if options.stop and built.tokenizer.eot_id is None:
        raise UserError(
            "sample.stop='end_of_text' needs a tokenizer with an end-of-text token; "
            f"{built.config['tokenizer']['name']!r} has none"
        )


def _check_steps(built: Experiment) -> None:
    """UserError where the process has its own steps, and an objective or the sampler others."""
    for user in (built.objective, built.eval_objective, built.sampler_step):
        if hasattr(user, "check"):
            user.check(built.process)
        if hasattr(user, "check_length"):
            user.check_length(built.data.length)
    own, sample = getattr(built.process, "timesteps", None), built.sample
    if own is not None and (sample.steps, sample.grid) != (own, "uniform"):
        raise UserError(
            f"sample.steps={sample.steps} and sample.grid={sample.grid!r} must be {own} and "
            f"'uniform': the process has process.timesteps={own} steps and a matrix for each"
        )


def evaluator(built: Experiment) -> Evaluator:
    """What estimates the bound of the `eval` section."""
    step = make_eval_step(built.network, built.eval_objective, built.eval.draws, built.eval.seed)
    return Evaluator(step, built.mesh, built.eval.draws, characters=built.tokenizer.is_character)
