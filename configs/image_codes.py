"""Images of 256 x 256 pixels with classes, as 16 x 16 codes of a published autoencoder, by MD4.

data.path is a directory with a folder of each class, such as ImageNet's training images. The
network has the size of DiT-B (arXiv:2212.09748). No run of this config has been made.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.data = dict(
        name="images", path="images", size=256, flip=True, labels=True, validation=0.005, test=0.01,
        autoencoder="hf:amused/amused-256/vqvae", length=256,
    )  # fmt: skip
    config.objective = dict(name="md4")
    config.network = dict(
        name="dit", patch=1, size=768, depth=12, heads=12, embedding=256, head_size=768,
        time_conditioning=False, qk_norm=True, dropout=0.1, classes=1000, label_dropout=0.1,
        dtype="bfloat16",
    )  # fmt: skip
    config.optim.update(learning_rate=4e-4, warmup_steps=5000, weight_decay=0.03)
    config.train.update(num_steps=500_000, batch_size=512, ema=0.9999)
    config.evals.validation.update(every=10_000, limit=2048, batch_size=64)
    config.evals.test.batch_size = 64
    config.evals.samples.every = 10_000
    config.sample.update(num=16, steps=32, name="confidence", noise=4.5)
    return config
