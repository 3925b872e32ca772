"""Duo's distillation on OpenWebText (arXiv:2506.10892): discrete consistency, in five rounds.

The teacher is a run of duo_owt.py, or the published checkpoint after --mode import:
--config configs/dcd_owt.py --config.train.initial=RUN. The time step grows from 1 / 512 to 16 /
512, and the student of each round of 10,000 steps is kept. This package has not been trained to the
end with these settings.
"""

from configs import udlm_owt


def get_config():
    config = udlm_owt.get_config()
    config.objective = dict(
        name="dcd", steps=512, round_steps=10_000, divergence="reverse_kl", low=-4.0, high=-1.0
    )
    config.train.update(num_steps=50_000, batch_size=128, ema=0.999)
    config.optim.update(learning_rate=6e-5, warmup_steps=500)
    config.checkpoint.keep_every = 10_000
    config.sample.update(name="psi", kappa=1.0, greedy_tail=True, steps=32)
    return config
