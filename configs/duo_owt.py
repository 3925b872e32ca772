"""Duo on OpenWebText (arXiv:2506.10892) without its curriculum, which is s-sahoo/duo's duo_base.

The paper reports a perplexity of <= 25.2 for its own code, which in the first 500,000 steps feeds
the network with softened Gaussian noise instead of tokens. That loss is for training only, and this
package does not have it. Model, noise and bound are those of UDLM, so that a checkpoint of Duo
evaluates to the same number. This package has not been trained to the end with these settings.
"""

from configs import udlm_owt


def get_config():
    return udlm_owt.get_config()
