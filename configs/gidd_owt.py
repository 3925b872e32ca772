"""GIDD on OpenWebText (arXiv:2503.04482): noise that is partly uniform, with the DiT of MDLM.

The published models have process.uniform=0.0, 0.1 and 0.2, and two sizes: this one, and
network.size=1024, depth=24, heads=16. They were trained on 131 billion tokens. This package has not
been trained to the end with these settings. Differences from the reference: docs/families/gidd.md.
"""

from configs import base, mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.process = dict(name="hybrid", uniform=0.1, gamma=1.0)
    config.objective = dict(name="gidd", weights="dynamic")
    config.data.update(length=512, windows="every")
    config.network.dropout = 0.0
    config.optim = base.get_config().optim
    config.optim.update(learning_rate=5e-4, warmup_steps=10_000, final_fraction=0.1, b2=0.99)
    config.optim.update(eps=1e-9, weight_decay=0.02, decayed="all", clip=1.0)
    config.train.update(num_steps=500_000, batch_size=512, ema=0.0)
    config.sample.steps = 128
    return config
