"""Duo on OpenWebText (arXiv:2506.10892): UDLM's model, noise and bound, learned by a curriculum.

In the first 500,000 steps the network reads softmaxes of Gaussian noise instead of tokens. That
loss is for training alone; a checkpoint of Duo evaluates to the same number. The paper reports a
perplexity of <= 25.2 for its own code. This package has not been trained to the end with these
settings.
"""

from configs import udlm_owt


def get_config():
    config = udlm_owt.get_config()
    config.objective = dict(
        name="duo", temperature=1e-3, low=-3.55, high=-1.85, kept=4, until=500_000
    )
    return config
