"""Edit Flows on OpenWebText (arXiv:2506.09487): texts of variable length, by edits.

:empty begins with an empty text and inserts tokens; :masks begins with 128 masks, as in dLLM.
Everything except the noise is as in flex_owt.py. This package has not been trained to the end with
these settings.
"""

from configs import flex_owt

FAMILIES = {
    "empty": ("deletion", "edit_flow", "edit", {}),
    "masks": ("edits", "masked_edit_flow", "masked_edit", {"masks": 128}),
}


def get_config(name):
    config = flex_owt.get_config()
    process, objective, sampler, options = FAMILIES[name]
    config.process = dict(name=process, schedule=dict(name="linear"), **options)
    config.objective = dict(name=objective)
    config.network.edits = name == "masks"
    config.sample.name = sampler
    return config
