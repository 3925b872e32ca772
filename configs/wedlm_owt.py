"""WeDLM's loss (arXiv:2512.22737) on OpenWebText, with MDLM's DiT: masked blocks and next tokens.

The blocks have 32 tokens, and next tokens have the same weight as masks, as in Tencent/WeDLM. Its
authors adapted Qwen2.5 and Qwen3; for that, import a model: docs/families/wedlm.md. The training
loss is no likelihood. Evaluators report the exact one of drawing from left to right. This package
has not been trained to the end with these settings.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.objective = dict(name="wedlm", block_size=32, left_to_right=1.0)
    config.train.update(batch_size=512, num_steps=250_000)
    config.sample.update(name="streaming", stop="end_of_text")
    return config
