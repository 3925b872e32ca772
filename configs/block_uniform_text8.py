"""Block diffusion with uniform noise on text8, in ten minutes on two CPU cores.

python -m md4_jax --config configs/block_uniform_text8.py --config.data.path=FILE

Like block_text8.py but without masks: tokens of a block may change until the block is finished.
"""

from configs import block_text8


def get_config():
    config = block_text8.get_config()
    config.process = dict(name="uniform", schedule=dict(name="linear"), parametrisation="joint")
    config.objective = dict(name="uniform_elbo", block=16)
    config.network.time_conditioning = True
    config.sample.grid = "uniform"
    return config
