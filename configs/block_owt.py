"""Block diffusion on OpenWebText (BD3-LM, arXiv:2503.09573): 150k steps after 850k of MDLM.

The first 850k steps: --config configs/mdlm_owt.py --config.network.tied=True
--config.train.num_steps=850000 --workdir MDLM. Then --config configs/block_owt.py with
--config.train.initial=MDLM. Blocks of 4: --config.objective.block=4.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.objective = dict(name="block", block=16)
    config.network.tied = True
    config.train.num_steps = 150_000
    config.sample.update(name="first_hitting", length=8192, stop="end_of_text", min_entropy=4.0)
    config.sample.memory = 1024
    return config
