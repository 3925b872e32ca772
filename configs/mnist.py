"""MNIST in about ten minutes on two CPU cores, with the digits as classes."""

from configs import digits


def get_config():
    config = digits.get_config()
    config.data = dict(
        name="mnist",
        path=None,  # directory of the idx files; None: the cache directory, or download them
        length=784,  # height x width
        levels=256,
        labels=True,
        validation=5000.0,  # the last of the 60,000 training images
        test=0.0,  # 0: the published test images
    )
    config.network.patch = 4
    config.train.update(num_steps=3000, ema=0.998, seconds=600.0)
    config.optim.warmup_steps = 200
    config.evals.validation.update(every=1000, draws=1, limit=240)
    config.evals.test.draws = 1
    config.evals.unlabelled.draws = 1
    config.evals.samples.every = 1000
    config.sample.steps = 128
    config.checkpoint.every = 1000
    return config
