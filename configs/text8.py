"""MD4 on text8 (arXiv:2406.04329), with the settings of google-deepmind/md4: 88,734,272 parameters.

The paper reports <= 1.37 bits per character on the test split for its own code. This package has
not been trained to the end with these settings.
"""

from configs import base, networks


def get_config():
    config = base.get_config()
    config.data.windows = "every"
    config.network.update(
        networks.MD4, size=768, depth=12, heads=12, embedding=64, dropout=0.05,
        attention_dropout=0.05,
    )  # fmt: skip
    config.optim.update(
        learning_rate=5e-4, warmup_steps=2000, decay="cosine", b2=0.999, weight_decay=0.03,
        decayed="all", clip=0.0,
    )  # fmt: skip
    config.evals.validation.every = 5000
    config.checkpoint.update(keep=5, keep_every=10_000)
    config.sample.steps = 1000
    return config
