"""A first model in a few minutes on two CPU cores: Shakespeare by characters, time-free."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = dict(name="shakespeare", length=256, separate_documents=False)
    config.tokenizer = dict(name="characters")
    # A training-only loss: all masked tokens have the same weight, and at most 80% of a sequence is
    # masked. The evaluators report the bound.
    config.objective = dict(name="any_order", weight_power=0.0, max_masked=0.8)
    config.network.update(size=128, depth=2, heads=2, time_conditioning=False, qk_norm=True)
    config.network.update(local_width=5, scan_blocks=False)
    # Counts of letters given their neighbours, more than a network of this size learns about these
    # in minutes. 0: no tables (docs/networks.md).
    config.network.update(tables=2**20, tables_hidden=32)
    config.optim = dict(
        name="muon",
        learning_rate=0.02,
        adam_learning_rate=0.02,
        ns_steps=3,
        preconditioning="aol",
        decay="cosine",
        warmup_steps=50,
        final_fraction=0.0,
        clip=1.0,
        # Even a machine that is too slow for all steps ends at a learning rate of zero.
        clock="seconds",
    )
    config.train.update(num_steps=3500, batch_size=4, ema=0.99, seconds=290.0)
    config.evals.validation.update(every=700, draws=4, limit=64, batch_size=16)
    config.evals.test.update(draws=4, batch_size=16)
    config.evals.ngrams.final = True
    config.checkpoint.every = 700
    config.log.every = 100
    return config
