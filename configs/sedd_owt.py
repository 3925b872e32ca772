"""SEDD on OpenWebText (arXiv:2310.16834): configs/sedd_owt.py:absorb_small and three more.

Others report perplexities of <= 24.10 (absorb) and 29.7 (uniform) for its own code, at the small
size. This package has not been trained to the end with these settings.
"""

from configs import mdlm_owt

ABSORB = dict(name="masking", schedule=dict(name="log_linear", eps=1e-3), conditioning="sigma")
UNIFORM = dict(
    name="uniform",
    schedule=dict(name="geometric", minimum=1e-4, maximum=20.0),
    parametrisation="score",
    conditioning="sigma",
)
SMALL = dict(size=768, depth=12, heads=12)
MEDIUM = dict(size=1024, depth=24, heads=16)
FAMILIES = dict(
    absorb_small=(ABSORB, SMALL),
    absorb_medium=(ABSORB, MEDIUM),
    uniform_small=(UNIFORM, SMALL),
    uniform_medium=(UNIFORM, MEDIUM),
)


def get_config(name):
    config = mdlm_owt.get_config()
    config.process, sizes = FAMILIES[name]
    config.network.update(sizes)
    config.objective = dict(name="score_entropy")
    config.train.num_steps = 1_300_000
    return config
