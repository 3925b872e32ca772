"""text8 as MD4 trains it (arXiv:2406.04329): 12 x 768, batch 512, 1M steps.

The paper reports <= 1.37 bits per character on the test split for its own code. This package
has not been trained to the end with these settings.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.sample.steps = 1000
    config.network.dtype = "bfloat16"
    return config
