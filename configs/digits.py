"""A first model of images in about two minutes on two CPU cores: digits of 8 x 8 pixels."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = dict(
        name="digits",
        length=64,  # height x width x channels
        levels=17,  # greys; fewer divide them into bins of equal width
        labels=True,  # the digit is the class of an image
        validation=0.1,
        test=0.1,
    )
    config.network.update(size=128, depth=4, heads=4, qk_norm=True, scan_blocks=False)
    config.network.update(classes=10, label_dropout=0.1, dropout=0.1)
    config.optim.update(learning_rate=2e-3, warmup_steps=100, weight_decay=0.01)
    config.train.update(num_steps=2000, batch_size=32, ema=0.995, seconds=120.0)
    config.evals.validation.update(every=500, draws=4, batch_size=60)
    config.evals.test.update(draws=16, batch_size=60)
    # The same images without their class, to compare with models that do not know it.
    config.evals.unlabelled = dict(config.evals.test, data=dict(labels=False))
    config.evals.samples.every = 600
    config.sample.update(num=16, steps=64)
    config.checkpoint.every = 500
    config.log.every = 100
    return config
