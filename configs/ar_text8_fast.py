"""Autoregressive baseline of text8_fast.py, with the same network, data and time budget.

python -m md4_jax --config configs/ar_text8_fast.py --config.data.path=FILE
"""

from configs import text8_fast


def get_config():
    config = text8_fast.get_config()
    config.objective = dict(name="autoregressive")
    config.network.causal = True
    config.sample.name = "left_to_right"
    # The likelihood is exact: one draw is enough.
    config.evals.validation.draws = config.evals.test.draws = 1
    return config
