"""The composition root: a config -> an experiment."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from md4_jax.config.checks import validate
from md4_jax.config.load import parse, unknown
from md4_jax.config.schema import fields, make
from md4_jax.data.domains import Domain
from md4_jax.evals.likelihood import Evaluator, make_eval_step
from md4_jax.experiment import Experiment
from md4_jax.generate.prompts import PromptOptions
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.options import (
    BenchOptions,
    CheckpointOptions,
    DataOptions,
    EvalOptions,
    LogOptions,
    MeshOptions,
    PlanOptions,
    SampleOptions,
    TrainOptions,
)
from md4_jax.protocols import Objective, UserError
from md4_jax.runtime.sharding import make_mesh
from md4_jax.samplers import GRIDS, loop
from md4_jax.samplers.blocks import Blocks, Stop
from md4_jax.samplers.grids import listed
from md4_jax.samplers.transforms import Transform, check_transform


def experiment(config: dict[str, Any], domain: Domain, devices: list | None = None) -> Experiment:
    """Builds and checks everything but the data, for these devices or all that there are."""
    train = fields(TrainOptions, config["train"])
    sample = fields(SampleOptions, config["sample"])
    data = fields(DataOptions, config["data"])
    mesh = make_mesh(fields(MeshOptions, config["mesh"]), devices)
    network = make("network", config["network"], vocab_size=domain.vocab_size)
    optimizer, rate = make("optim", config["optim"]).build(train.num_steps)
    prompt = fields(PromptOptions, config["sample"])
    transform = fields(Transform, config["sample"])
    check_transform(transform.temperature, transform.top_k, transform.top_p)
    process = make("process", config["process"], vocab_size=domain.vocab_size)
    objective = make("objective", config["objective"])
    experiment = Experiment(
        config=config,
        domain=domain,
        network=network.build(mesh.devices.flat[0].platform),
        process=process,
        objective=objective,
        eval_objective=_eval_objective(config, objective, process),
        optimizer=optimizer,
        learning_rate=rate,
        sampler_step=make("sample", config["sample"], transform=transform),
        loop=_loop(objective, sample, data, domain),
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
    validate(experiment)
    return experiment


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


def _loop(objective: Objective, sample: SampleOptions, data: DataOptions, domain: Domain):
    """What runs the sampler's steps: over all of a text, or block by block."""
    block = sample.block or getattr(objective, "block", 0)
    if not block:
        return loop.sample
    stop = Stop(domain.eot_id if sample.stop else None, sample.min_entropy)
    return Blocks(block, sample.memory or data.length, stop, sample.cached)


def _reported(config: Mapping[str, Any]) -> Mapping[str, Any]:
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
    section = _reported(config)
    automatic = config["eval"]["objective"]["name"] == "auto"
    same = section["name"] == config["objective"]["name"]
    fits = isinstance(process, objective.needs.processes) and objective.is_bound(process)
    if automatic and same and fits:
        return objective
    return make("eval.objective", section)


def evaluator(experiment: Experiment) -> Evaluator:
    """What estimates the bound of the `eval` section."""
    step = make_eval_step(
        experiment.network, experiment.eval_objective, experiment.eval.draws, experiment.eval.seed
    )
    is_exact = getattr(experiment.eval_objective, "is_exact", lambda network: False)
    return Evaluator(
        step,
        experiment.mesh,
        experiment.eval.draws,
        characters=experiment.domain.unit == "character",
        exact=is_exact(experiment.network),
    )
