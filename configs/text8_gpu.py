"""text8 in ten minutes on one GPU.

python -m md4_jax --config configs/text8_gpu.py --config.data.path=FILE
"""

from configs import text8_fast


def get_config():
    config = text8_fast.get_config()
    config.network.update(size=768, depth=12, heads=12, dropout=0.1, dtype="bfloat16")
    config.optim.adam_learning_rate = 0.005
    config.train.update(num_steps=40_000, batch_size=64, ema=0.999)
    return config
