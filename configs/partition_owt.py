"""Partition generative modelling on OpenWebText (arXiv:2505.18883), sizes of nkalyanv99/UNI-D2.

MDLM's recipe (mdlm_owt.py) with 6 encoder and 6 decoder blocks; a step has 512 sequences of 1,024
tokens. docs/families/partition.md lists uncertain details. This package has not been trained to the
end with these settings.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.objective = dict(name="partition")
    config.network.update(name="partition", depth=12, decoder_depth=6, time_conditioning=False)
    config.train.batch_size = 512
    return config
