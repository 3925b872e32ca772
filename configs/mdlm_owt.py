"""MDLM on OpenWebText (arXiv:2406.07524), as kuleshov-group/mdlm: a time-free DiT.

The paper and others report perplexities of <= 22.98 to 23.21 for its own code. This package has not
been trained to the end with these settings.
"""

from configs import base, networks, owt


def get_config():
    config, own = owt.get_config(), base.get_config()
    config.process = dict(
        name="masking", schedule=dict(name="log_linear", eps=1e-3), conditioning="zero"
    )
    config.network, config.optim = own.network, own.optim
    config.network.update(networks.DIT, size=768, depth=12, heads=12, dropout=0.1)
    config.optim.update(learning_rate=3e-4, warmup_steps=2500, decay="constant", clip=1.0)
    config.sample.grid = "uniform"
    return config
