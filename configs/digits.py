"""A first image model in about two minutes on two CPU cores: digits of 8 x 8 pixels."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = dict(
        name="digits",
        length=64,  # height x width x channels
        levels=17,  # grey levels; fewer levels are bins of equal width
        labels=True,  # the digit is the class of an image
        validation=0.1,
        test=0.1,
    )
    # A training-only loss: all masked pixels have the same weight. The evaluators report the bound.
    config.objective = dict(name="any_order", weight_power=0.0)
    config.network = dict(
        name="dit", patch=2, size=128, depth=4, heads=4, embedding=16, head_size=64,
        time_conditioning=False, qk_norm=True, dropout=0.1, classes=10, label_dropout=0.1,
        scan_blocks=False,
    )  # fmt: skip
    config.optim = dict(
        name="muon", learning_rate=0.02, adam_learning_rate=0.02, ns_steps=3,
        preconditioning="aol", decay="cosine", warmup_steps=50, final_fraction=0.0, clip=1.0,
    )  # fmt: skip
    config.train.update(num_steps=2000, batch_size=32, ema=0.995)
    config.evals.validation.update(every=500, draws=4, batch_size=60)
    config.evals.test.update(draws=16, batch_size=60)
    # The same images without their classes, to compare with unconditional models.
    config.evals.unlabelled = dict(config.evals.test, data=dict(labels=False))
    config.evals.samples.every = 600
    config.sample.update(num=16, steps=64)
    config.checkpoint.every = 500
    config.log.every = 100
    return config
