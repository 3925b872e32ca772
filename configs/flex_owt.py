"""FlexMDM on OpenWebText (arXiv:2509.01025), as brianlck/FlexMDM: texts of variable length.

Each page is one sequence, cut at data.length tokens, and its length is modelled. The network reads
data.length + 1 positions. This package has not been trained to the end with these settings.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.data.update(length=1023, windows="documents")
    config.process = dict(
        name="insertion", schedule=dict(name="linear"), insertion=dict(name="linear")
    )
    config.objective = dict(name="flexmdm")
    config.network.update(gaps=True, time_conditioning=True, dropout=0.05)
    config.optim.update(decay="cosine", warmup_steps=2000, weight_decay=0.03, decayed="all")
    config.train.batch_size = 1024
    config.sample.update(name="insert", steps=1024)
    return config
