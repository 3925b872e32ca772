"""DreamOn (arXiv:2602.01326) on Shakespeare by characters: infilling of variable length.

Two ids after the alphabet are the expansion and the deletion of a mask. In minutes on two CPU cores
the network learns words, but not yet the lengths of missing parts.
"""

from configs import quickstart


def get_config():
    config = quickstart.get_config()
    config.tokenizer.spare = 2
    config.process = dict(name="resizing", schedule=dict(name="linear"))
    config.objective = dict(name="dreamon", most_deleted=16)
    config.network.update(tables=0, tables_hidden=0)
    config.evals.ngrams.final = False
    config.sample.update(name="resize", grid="uniform")
    return config
