"""MD4 on CIFAR-10 (arXiv:2406.04329), with the settings of google-deepmind/md4.

28,427,520 parameters. The paper reports <= 2.75 bits per dimension on the test images for its own
code. This package has not been trained to the end with these settings. For the best samples the
reference uses process.schedule.name="cosine" and sample.grid="uniform".
"""

from configs import base


def get_config():
    config = base.get_config()
    config.data = dict(name="cifar10", length=32 * 32 * 3, labels=False)
    config.network = dict(
        name="unet", channels=128, blocks=32, time_conditioning=True, dropout=0.1,
        scan_blocks=True, dtype="float32",
    )  # fmt: skip
    config.optim.update(
        learning_rate=2e-4, warmup_steps=100, decay="cosine", b2=0.99, weight_decay=0.01,
        decayed="all", clip=0.0,
    )  # fmt: skip
    config.train.update(num_steps=2_000_000, batch_size=256)
    # As in the reference, no training images are held out.
    config.evals.validation.update(split="test", every=10_000)
    config.checkpoint.update(keep=5, keep_every=10_000)
    config.sample.update(steps=256, grid="cosine")
    return config
