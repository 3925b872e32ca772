"""MD4 on ImageNet 64 (arXiv:2406.04329), with the settings of google-deepmind/md4.

204,595,712 parameters; the paper states 198M. It reports <= 3.40 bits per dimension for its own
code. This package has not been trained to the end with these settings. The data are the older set
without classes (docs/images.md).
"""

from configs import cifar10


def get_config():
    config = cifar10.get_config()
    config.data = dict(
        name="tfds_images", dataset="downsampled_imagenet/64x64", label_key="",
        image_shape=(64, 64, 3), test_split="validation", length=64 * 64 * 3,
    )  # fmt: skip
    config.network = dict(
        name="uvit", channels=256, blocks=8, size=768, depth=20, heads=12, time_conditioning=True,
        dropout=0.1, scan_blocks=True, dtype="float32",
    )  # fmt: skip
    config.train.batch_size = 512
    return config
