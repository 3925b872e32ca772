"""MD4-M on OpenWebText (arXiv:2406.04329), as google-deepmind/md4: 416,240,960 parameters."""

from configs import owt


def get_config():
    config = owt.get_config()
    config.network.update(size=1024, depth=24, heads=16, hidden=2752)
    config.network.update(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
    config.process.schedule = dict(name="cosine")
    config.sample.grid = "uniform"
    return config
