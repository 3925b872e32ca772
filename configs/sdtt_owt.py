"""SDTT on OpenWebText (arXiv:2410.21035): MDLM distilled from 1024 steps to 8, in seven rounds.

The teacher is a run of mdlm_owt.py, or the published checkpoint after --mode import:
--config configs/sdtt_owt.py --config.train.initial=RUN. Round r of 10,000 steps results in a
student that samples with 512 / 2^r steps, and its checkpoint is kept. This package has not been
trained to the end with these settings.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.objective = dict(
        name="sdtt", steps=1024, per_step=2, round_steps=10_000, divergence="reverse_kl"
    )
    config.train.update(num_steps=70_000, batch_size=128)
    config.optim.update(learning_rate=6e-5, warmup_steps=500)
    config.checkpoint.keep_every = 10_000
    config.sample.steps = 8
    return config
