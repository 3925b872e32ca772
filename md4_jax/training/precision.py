"""Types of stored parameters, and checks of those that are trained."""

import jax

from md4_jax.experiment import Experiment
from md4_jax.protocols import Params, UserError
from md4_jax.training.loop import abstract_state
from md4_jax.training.optim import hidden_matrices
from md4_jax.training.trainable import matching, stored


def abstract_params(experiment: Experiment) -> Params:
    """Returns the shapes and shardings of the averaged parameters of a model for inference.

    If none is frozen, all parameters of the network have the type `network.parameters`.
    """
    state = abstract_state(experiment)
    if state.frozen:
        return state.averaged
    network = stored(state.ema["network"], experiment.network.parameters)
    return {**state.ema, "network": network}


def check_trainable(experiment: Experiment) -> None:
    """Raises UserError if the parameters cannot be trained, or not be split over the mesh."""
    state, dtype = abstract_state(experiment), experiment.network.parameters
    if dtype != "float32" and not state.frozen:
        raise UserError(
            f"network.parameters={dtype!r} is only for parameters that are not trained, because "
            "updates are too small for its precision, but all parameters are trained: set "
            "network.lora_rank or train.trainable to train only some of them, or "
            "network.parameters='float32'"
        )
    added = experiment.network.added
    if experiment.objective.needs.quality and not matching(state.params["network"], added):
        asked = experiment.train.trainable
        raise UserError(
            f"train.trainable={asked!r} does not train the head of network.quality, which "
            f"objective.name={experiment.config['objective']['name']!r} is for: set it to "
            f"{asked + '|quality/'!r}"
        )


def check_matrices(experiment: Experiment) -> None:
    """Raises UserError if a learning rate that is only for matrices of blocks has none to train."""
    rate, config = experiment.learning_rate, experiment.config
    matrices = hidden_matrices(abstract_state(experiment).params)
    if jax.tree.leaves(matrices) or not rate.of_matrices:
        return
    asked, name = experiment.train.trainable, config["optim"]["name"]
    what = f"train.trainable={asked!r}" if asked else f"network.name={config['network']['name']!r}"
    raise UserError(
        f"optim.name={name!r} with {what} trains no matrix of a block: Adam would train all "
        f"parameters, with optim.adam_learning_rate, and optim.learning_rate={rate.peak} would "
        "have no effect. Set optim.name='adamw'"
    )
