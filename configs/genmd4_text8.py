"""GenMD4 on text8 (arXiv:2406.04329), with the settings of google-deepmind/md4.

The paper reports <= 1.34 bits per character on the test split for its own code. This package has
not been trained to the end with these settings.
"""

from configs import text8


def get_config():
    config = text8.get_config()
    config.process = dict(name="state_dependent", initial_power=1.0)
    config.objective = dict(name="genmd4")
    config.optim.learning_rate = 3e-4
    return config
