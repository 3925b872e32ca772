"""A run of a few seconds; saves, lines and evaluations fall on different steps."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = dict(name="shakespeare", length=16, separate_documents=False)
    config.tokenizer = dict(name="characters")
    config.network.update(size=32, depth=1, heads=2, hidden=64, scan_blocks=False)
    config.network.products = "float32"  # runs are compared to more digits than bfloat16 has
    config.optim.update(learning_rate=1e-2, warmup_steps=4)
    config.train.update(num_steps=30, batch_size=8, ema=0.9)
    config.evals.validation.update(every=10, limit=64, batch_size=64)
    config.evals.test.batch_size = 64
    config.sample.update(num=2, steps=4)
    config.checkpoint.every = 7
    config.log.every = 3
    return config
