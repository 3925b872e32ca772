"""DPLM-150M on UniRef50 (arXiv:2402.18567), as bytedance/dplm: masked diffusion for proteins.

This is its second stage, which starts from a trained ESM-2: import one, and give its run as
train.initial. data.path is UniRef50's FASTA file. This package has not been trained to the end with
these settings.
"""

from configs import base, networks


def get_config():
    config = base.get_config()
    config.data = dict(
        name="text", path="uniref50.fasta.gz", length=1022, windows="documents",
        validation=0.001, test=0.001,
    )  # fmt: skip
    config.tokenizer = dict(name="proteins")
    config.process.schedule.name = "linear"
    config.objective = dict(name="reparameterized", timesteps=500, weights="linear")
    config.network.update(networks.ESM, name="esm", size=640, depth=30, heads=20, hidden=2560)
    config.network.update(token_dropout=True, dropout=0.1, dtype="bfloat16")
    config.optim.update(
        learning_rate=4e-5, decay="linear", final_fraction=0.25, warmup_steps=2000, b2=0.98,
        weight_decay=0.01, decayed="all", clip=0.0,
    )  # fmt: skip
    # DPLM's batches have a million residues; this assumes 256 per protein.
    config.train.update(num_steps=100_000, batch_size=4096, ema=0.0)
    config.evals.validation.every = 5000
    config.evals.ngrams.update(final=False)
    config.sample.update(
        name="reparameterized", grid="uniform", steps=500, length=200, exclude="<cls> <pad> <eos> X"
    )
    return config
