"""Block diffusion on text8, in ten minutes on two CPU cores.

python -m md4_jax --config configs/block_text8.py --config.data.path=FILE

To evaluate and sample with blocks of 4: --config.evals.test.objective.name=block
--config.evals.test.objective.block=4 --config.sample.block=4.
"""

from configs import text8_fast


def get_config():
    config = text8_fast.get_config()
    config.objective = dict(name="block", block=16)
    config.network.local_width = 0
    config.sample.update(steps=16, length=1024)
    return config
