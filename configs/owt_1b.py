"""1.2 billion parameters on OpenWebText's tokens: 20 time-free blocks of 2048, for many chips.

The network is time-free, because time conditioning would be a third of a block's parameters.
Parameters and optimizer state are split over mesh.fsdp chips.
"""

from configs import base, owt


def get_config():
    config, own = owt.get_config(), base.get_config()
    config.network, config.optim = own.network, own.optim
    config.network.update(size=2048, depth=20, heads=16, time_conditioning=False, qk_norm=True)
    config.network.update(dtype="bfloat16", remat="dots")
    config.mesh.fsdp = 64
    config.optim.update(learning_rate=2e-4, b2=0.95, weight_decay=0.1)
    return config
