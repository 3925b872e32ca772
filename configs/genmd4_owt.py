"""GenMD4 on OpenWebText (arXiv:2406.04329), with the settings of google-deepmind/md4.

Others report a perplexity of 21.8 for its code. This package has not been trained to the end with
these settings.
"""

from configs import owt


def get_config():
    config = owt.get_config()
    config.process = dict(name="state_dependent", initial_power=1.0)
    config.objective = dict(name="genmd4")
    config.checkpoint.keep_every = 0
    return config
