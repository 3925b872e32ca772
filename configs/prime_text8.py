"""Partial masking on text8 (MDM-Prime, arXiv:2505.18495): sub-tokens, and MD4's network for text8.

The 27 symbols are written as three digits in base 3, so that each combination is a symbol. The
papers have no text8. This package has not been trained to the end with these settings.
"""

from configs import text8


def get_config():
    config = text8.get_config()
    config.process = dict(name="partial_masking", schedule=dict(name="linear"), parts=3)
    config.objective = dict(name="prime", form="bound")
    config.network.update(name="sub_tokens", parts=3, embedding=96)
    return config
