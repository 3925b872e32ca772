"""E2D2 on OpenWebText (arXiv:2510.22852), as kuleshov-group/e2d2: an encoder and a decoder.

They have 10 and 2 blocks with Qwen3's layers and the heads of Qwen3-0.6B. Blocks of text have 4
tokens; a step has 512 sequences of 1,024 tokens. Training gives all blocks equal weight, and the
evaluators report the bound: docs/families/e2d2.md. This package has not been trained to the end
with these settings.
"""

from configs import mdlm_owt, networks


def get_config():
    config = mdlm_owt.get_config()
    config.objective = dict(name="block", block=4, weights="equal")
    config.network.update(networks.QWEN3, name="encoder_decoder", depth=10, decoder_depth=2)
    config.network.update(
        size=768, hidden=3072, heads=16, kv_heads=8, head_dim=128, tied=True, feed_forward="swiglu",
        norm="rms", dropout=0.0,
    )  # fmt: skip
    # In the reference the weight decay of 1e-5 is not multiplied by the learning rate.
    config.optim.update(warmup_steps=2000, b2=0.98, weight_decay=1e-5 / 3e-4, decayed="all")
    config.train.update(batch_size=512, num_steps=1_000_000)
    config.sample.update(name="first_hitting", length=1024, stop="end_of_text")
    return config
