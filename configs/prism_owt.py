"""PRISM on OpenWebText (arXiv:2510.01384), as SeunggeunKimkr/PRISM: MDLM that judges its tokens.

It continues from a trained MDLM: give its run by --config.train.initial=RUN. The settings are those
of the published scripts, except that their training draws tokens by top-p. This package has not
been trained to the end with these settings.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.network.quality = True
    config.objective = dict(name="prism", quality=2.0, tokens=8, texts=4)
    config.optim.learning_rate = 1.5e-4
    config.train.update(num_steps=20_000, batch_size=256)
    config.sample.update(name="prism", eta=0.01, since=0.5, steps=256, top_p=0.9)
    return config
