"""LLaDA-8B (arXiv:2502.09992): 8.0 billion parameters, with the settings of its fine-tuning.

This config is for --mode plan. To continue from the published parameters, use --mode import, which
takes the network from the checkpoint: docs/python.md.
"""

from configs import base, networks


def get_config():
    config = base.get_config()
    config.data = dict(
        name="public",
        dataset="openwebtext",
        path=None,
        length=4096,
        separate_documents=False,
        validation=0.001,
        test=100_000.0,
    )
    # Its mask is the symbol after these; it is followed by the special tokens of a chat.
    config.tokenizer = dict(name="bpe", path=None, hub="GSAI-ML/LLaDA-8B-Base", size=126_336)
    config.network.update(networks.LLADA, size=4096, depth=32, heads=32, hidden=12_288)
    config.network.update(dtype="bfloat16", remat="full")
    config.optim.update(
        learning_rate=2.5e-5, decay="constant", warmup_steps=50, b2=0.95, weight_decay=0.1
    )
    # One sequence per chip at a time.
    config.train.update(num_steps=10_000, batch_size=256, microbatches=16)
    config.evals.validation.update(every=500, limit=256, batch_size=16)
    config.evals.test.batch_size = 16
    config.mesh.fsdp = 16
    config.sample.update(grid="uniform", length=1024, steps=256)
    config.checkpoint.every = 500
    return config
