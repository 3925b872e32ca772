"""Edit Flows with insertions on OpenWebText (arXiv:2506.09487): texts of their own lengths.

Each page, or piece of a long one, is a sequence, and its length is modelled. All but the noise is
as in flex_owt.py. This package has not been trained to the end with these settings.
"""

from configs import flex_owt


def get_config():
    config = flex_owt.get_config()
    config.process = dict(name="deletion", schedule=dict(name="linear"))
    config.objective = dict(name="edit_flow")
    config.sample.name = "edit"
    return config
