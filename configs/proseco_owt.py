"""ProSeCo on OpenWebText (arXiv:2602.11590), as kuleshov-group/proseco: MDLM that corrects itself.

MDLM's recipe (mdlm_owt.py) with the second loss of its published script: times of at least 0.1,
tokens of the network also at visible positions, and wrong tokens weighed more. This package has not
been trained to the end with these settings.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.objective = dict(
        name="proseco", weighted=True, everywhere=True, upweighted=True, least_time=0.1
    )
    config.sample.update(name="proseco", corrections=4, every=1)
    return config
