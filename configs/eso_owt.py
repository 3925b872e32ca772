"""Eso-LM (B) on OpenWebText (arXiv:2506.01928), as s-sahoo/Eso-LMs: MDLM's DiT in an order.

An eighth of the tokens by diffusion, the rest from left to right; of 512 sequences of a step 256
have the loss of diffusion. Other shares: --config.objective.alpha_0=0.25. Their scripts train for
250,000 steps. The likelihood that is reported is that of the sampler with a cache (their
eval.num_iw_orders=1), not the sum of the two losses: docs/families/eso_lm.md. This package has not
been trained to the end with these settings.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.objective = dict(name="eso", alpha_0=0.125, split=0.5)
    config.train.update(batch_size=512, num_steps=250_000)
    config.sample.update(name="eso", steps=1024, top_p=0.9)
    return config
