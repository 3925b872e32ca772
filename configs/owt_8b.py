"""8.1 billion parameters on OpenWebText's tokens: 38 time-free blocks of 4096, for many chips."""

from configs import owt_1b


def get_config():
    config = owt_1b.get_config()
    config.network.update(size=4096, depth=38, heads=32, remat="full")
    config.optim.learning_rate = 1e-4
    return config
