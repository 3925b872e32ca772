"""Duo on OpenWebText (arXiv:2506.10892): UDLM's model, noise and bound, with a curriculum.

In the first 500,000 steps the network reads softmaxes of noisy Gaussian logits instead of tokens.
This is a training-only loss. The paper reports a perplexity of <= 25.2 for its own code, which its
checkpoint also reaches here. This package has not been trained to the end with these settings.
"""

from configs import udlm_owt


def get_config():
    config = udlm_owt.get_config()
    config.objective = dict(
        name="duo", temperature=1e-3, low=-3.55, high=-1.85, kept=4, until=500_000
    )
    return config
