"""Merging of a model's low-rank adapters into its matrices."""

import copy
import dataclasses
from typing import Any

import jax

from md4_jax.config import build
from md4_jax.config.schema import build_section
from md4_jax.networks import adapters
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place
from md4_jax.training.precision import abstract_params


def merged(model: Any) -> Any:
    """Returns the model with each matrix W replaced by W + alpha / rank A B.

    Its config has network.lora_rank=0, and trains all parameters. UserError if it has no adapters.
    """
    section, domain = model.config["network"], model.domain
    if not model.experiment.network.adapters:
        raise UserError(
            f"merged=True merges adapters into the matrices that they adapt, but {model.origin} "
            f"has no adapters (network.lora_rank={section.get('lora_rank', 0)})"
        )
    config = copy.deepcopy(model.config)
    config["network"]["lora_rank"] = 0
    config["network"]["lora_dropout"] = 0.0
    config["train"]["trainable"] = ""
    devices = list(model.experiment.mesh.devices.flat)
    experiment = build.experiment(config, domain, devices, place(model.origin))
    shape = tuple(domain.shape)
    options = build_section("network", section, vocab_size=domain.vocab_size, shape=shape)
    scale = options.lora_alpha / options.lora_rank
    wanted = jax.tree.map(lambda x: x.sharding, abstract_params(experiment)["network"])
    fold = jax.jit(lambda params: adapters.merged(params, scale), out_shardings=wanted)
    params = {**model.params, "network": fold(model.params["network"])}
    layout = model.layout and model.layout.of_other_parameters()
    return dataclasses.replace(model, experiment=experiment, params=params, layout=layout)
