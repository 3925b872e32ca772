"""CANDI on text8 (arXiv:2510.22510): Gaussian noise at masks, with the network of MD4's text8.

The noise is the paper's, r from 0.05 to 0.45; r is relative to all 27 symbols, and confusion to the
26 wrong ones. objective.form="cross_entropy" is the paper's loss, which is not a bound. This
package has not been trained to the end with these settings.
"""

from configs import text8

SYMBOLS = 27


def get_config():
    config = text8.get_config()
    config.process = dict(
        name="gaussian_masking",
        schedule=dict(name="linear"),
        confusion_start=0.05 * SYMBOLS / (SYMBOLS - 1),
        confusion_end=0.45 * SYMBOLS / (SYMBOLS - 1),
        parametrisation="mixture",
    )
    config.objective = dict(name="candi", form="bound")
    return config
