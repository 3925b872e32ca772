"""RADD on OpenWebText (arXiv:2406.03736): configs/radd_owt.py:t_dce and lambda_dce.

Its DiT is time-free. This package has not been trained to the end with these settings.
"""

from configs import base, mdlm_owt, networks

FAMILIES = dict(t_dce="t_dce", lambda_dce="lambda_dce")


def get_config(name):
    config = mdlm_owt.get_config()
    config.process = dict(name="masking", schedule=dict(name="log_linear", eps=1e-3))
    config.network = base.get_config().network
    config.network.update(networks.RADD, size=768, depth=12, heads=12, dropout=0.02)
    config.objective = dict(name=FAMILIES[name])
    return config
