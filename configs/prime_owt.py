"""MDM-Prime on OpenWebText (arXiv:2505.18495), as chen-hao-chao/mdm-prime: four sub-tokens.

MDLM's recipe (mdlm_owt.py). The published models have process.parts=network.parts=2, 3, 4, 6 and 8,
with the loss objective.form="joint", which is not a bound; so this one has a bound instead
(docs/families/partial_masking.md). process.shuffle=1 with 16 parts is MDM-Prime-v2. This package
has not been trained to the end with these settings.
"""

from configs import mdlm_owt


def get_config():
    config = mdlm_owt.get_config()
    config.process.update(name="partial_masking", parts=4)
    config.objective = dict(name="prime", form="bound")
    config.network.update(name="sub_tokens", parts=4)
    config.sample.update(steps=512, top_p=0.95)
    return config
