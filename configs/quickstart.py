"""A first model in a few minutes on two CPU cores: Shakespeare by characters, time-free."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = dict(name="shakespeare", length=256, separate_documents=False)
    config.tokenizer = dict(name="characters")
    # Trained with every masked token weighing the same, which learns faster than the
    # bound's weights in a short run; what is reported is the bound.
    config.objective = dict(name="any_order", weight_power=0.0)
    config.network.update(size=128, depth=4, heads=4, time_conditioning=False, scan_blocks=False)
    config.optim = dict(
        name="muon",
        learning_rate=0.02,
        adam_learning_rate=0.01,
        decay="cosine",
        warmup_steps=50,
        final_fraction=0.0,
        clip=1.0,
    )
    config.train.update(num_steps=1500, batch_size=4, ema=0.99, seconds=290.0)
    config.eval.update(every=500, draws=4, limit=64, ngram_order=5, batch_size=16)
    config.checkpoint.every = 500
    config.log.every = 50
    return config
