"""FlexMDM on OpenWebText (arXiv:2509.01025): texts of their own lengths, up to 1023 tokens.

Each text, or piece of a long one, is a sequence, and its length is modelled. The network reads one
position more than data.length. The settings are those of mdlm_owt.py; the paper trains with a
network of 175M parameters. This package has not been trained to the end with them.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.data.update(length=1023, windows="documents")
    config.process = dict(
        name="insertion", schedule=dict(name="linear"), insertion=dict(name="linear")
    )
    config.objective = dict(name="flexmdm")
    config.network.update(gaps=True, time_conditioning=True)
    config.sample.update(name="insert", grid="uniform", steps=1024)
    return config
