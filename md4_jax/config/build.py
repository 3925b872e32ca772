"""The composition root: a config -> an experiment."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from md4_jax.config.checks import validate
from md4_jax.config.load import parse, unknown
from md4_jax.config.schema import arguments_of, build_section, options_from
from md4_jax.data.domains import Domain
from md4_jax.evals import EVALUATORS
from md4_jax.experiment import Experiment
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.options import (
    BenchOptions,
    CheckpointOptions,
    DataOptions,
    LogOptions,
    MeshOptions,
    PlanOptions,
    PromptOptions,
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
    train = options_from(TrainOptions, config["train"])
    sample = options_from(SampleOptions, config["sample"])
    data = options_from(DataOptions, config["data"])
    mesh = make_mesh(options_from(MeshOptions, config["mesh"]), devices)
    network = build_section("network", config["network"], vocab_size=domain.vocab_size)
    optimizer, rate = build_section("optim", config["optim"]).build(train.num_steps)
    prompt = options_from(PromptOptions, config["sample"])
    transform = options_from(Transform, config["sample"])
    check_transform(transform.temperature, transform.top_k, transform.top_p)
    process = build_section("process", config["process"], vocab_size=domain.vocab_size)
    objective = build_section("objective", config["objective"])
    experiment = Experiment(
        config=config,
        domain=domain,
        network=network.build(mesh.devices.flat[0].platform),
        process=process,
        objective=objective,
        optimizer=optimizer,
        learning_rate=rate,
        sampler_step=build_section("sample", config["sample"], transform=transform),
        loop=_loop(objective, sample, data, domain),
        grid=_grid(sample),
        mesh=mesh,
        data=data,
        train=train,
        evals=_evaluators(config, objective, process),
        sample=sample,
        prompt=prompt,
        checkpoint=options_from(CheckpointOptions, config["checkpoint"]),
        log=options_from(LogOptions, config["log"]),
        bench=options_from(BenchOptions, config["bench"]),
        plan=options_from(PlanOptions, config["plan"]),
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


def _evaluators(config: Mapping[str, Any], objective: Objective, process: Any) -> dict[str, Any]:
    """The evaluators by name, each with its bound if it has one.

    They run in this order: kinds as EVALUATORS has them, so that n-gram models find the bound.
    """
    kinds = list(EVALUATORS)
    found = {}
    for name, section in sorted(
        config["evals"].items(),
        key=lambda item: kinds.index(item[1]["name"]) if item[1]["name"] in kinds else len(kinds),
    ):
        path = f"evals.{name}"
        supplied = {}
        if "objective" in arguments_of(path, section["name"]):
            supplied["objective"] = _bound(path, config, section, objective, process)
        try:
            found[name] = build_section(path, section, **supplied)
        except UserError as error:
            said = str(error)
            raise UserError(said if said.startswith(path) else f"{path}.{said}") from error
    return found


def _bound(
    path: str,
    config: Mapping[str, Any],
    section: Mapping[str, Any],
    objective: Objective,
    process: Any,
) -> Objective:
    """The bound that an evaluator reports: with `auto`, the training objective where it is it."""
    asked = section.get("objective", {"name": "auto"})
    if asked["name"] != "auto":
        return build_section(f"{path}.objective", asked)
    tightest = _tightest(config)
    fits = isinstance(process, objective.needs.processes) and objective.is_bound(process)
    if tightest["name"] == config["objective"]["name"] and fits:
        return objective
    return build_section("objective", tightest)


def _tightest(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of the bound that `auto` stands for."""
    process, name = config["process"], BOUNDS[config["process"]["name"]]
    if config["objective"]["name"] == "block":
        return {"name": "block", "block": config["objective"].get("block", BlockDiffusion.block)}
    if config["network"].get("causal"):
        name = "autoregressive"
    elif process.get("parametrisation") == "score":
        name = "score_entropy"
    return {"name": name}
