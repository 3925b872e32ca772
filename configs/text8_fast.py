"""text8 in ten minutes on two CPU cores.

python -m md4_jax --config configs/text8_fast.py --config.data.path=FILE
"""

from configs import base, quickstart


def get_config():
    config = quickstart.get_config()
    config.data = base.get_config().data
    config.tokenizer = dict(name="text8")
    config.network.update(depth=4, tables=0, tables_hidden=0)
    # More steps than fit into ten minutes: the learning rate follows the seconds (optim.clock).
    config.train.update(num_steps=30_000, seconds=600.0, ema=0.995)
    config.optim.warmup_steps = 100
    config.evals.validation.update(every=2000, draws=2, limit=256)
    config.evals.test.draws = 2
    config.checkpoint.every = 2000
    config.log.every = 100
    return config
