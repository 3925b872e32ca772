"""MD4-M on OpenWebText: owt.py with 24 blocks of width 1024 (arXiv:2406.04329)."""

from configs import owt


def get_config():
    config = owt.get_config()
    config.network.update(size=1024, depth=24, heads=16)
    return config
