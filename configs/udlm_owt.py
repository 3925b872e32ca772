"""UDLM on OpenWebText (arXiv:2412.10193): uniform noise, with the DiT and recipe of MDLM.

Others report a perplexity of <= 27.4 for its own code. This package has not been trained to the end
with these settings. Duo (arXiv:2506.10892) trains the same model faster with a curriculum:
duo_owt.py.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.process = dict(
        name="uniform",
        schedule=dict(name="log_linear", eps=1e-3),
        parametrisation="joint",
        conditioning="sigma",
    )
    config.objective = dict(name="uniform_elbo")
    return config
