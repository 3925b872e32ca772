"""Discrete flow matching with the network, recipe and data of text8_fast.py, by its own bound.

python -m md4_jax --config configs/flow_text8.py:joint --config.data.path=FILE

mixture  the outputs are the posterior of the clean tokens, as in the library flow_matching. The
         schedule stops before the pole at t = 0; the cost of this is part of the bound
joint    the outputs exclude the evidence of the noisy token itself; there is no pole
metric   noise changes a letter to a nearby one in the alphabet. This is only an example; text needs
         meaningful distances (process.table)
"""

from configs import text8_fast

BEFORE_POLE = dict(name="geometric", minimum=1e-4)
FAMILIES = dict(
    mixture=dict(name="uniform", schedule=BEFORE_POLE, parametrisation="mixture"),
    joint=dict(name="uniform", schedule=dict(name="linear"), parametrisation="joint"),
    metric=dict(name="metric_path", power=1.0, scale=3.0, exponent=1.0, parametrisation="joint"),
)


def get_config(name):
    config = text8_fast.get_config()
    config.train.num_steps, config.optim.clock = 4800, "steps"
    config.process, bound = FAMILIES[name], dict(name="generalized_kl")
    config.objective = config.evals.validation.objective = config.evals.test.objective = bound
    config.network.time_conditioning = True
    config.sample.update(name="flow", steps=256, grid="uniform")
    return config
