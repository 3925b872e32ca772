"""D3PM on LM1B (arXiv:2107.03006, appendix B.2): configs/d3pm_lm1b.py:absorbing and uniform.

The paper reports a perplexity per word of <= 76.9 (absorbing) and <= 137.9 (uniform) with 1000
steps, where the end of a text counts as a word. Its vocabulary has 8,192 sentencepiece tokens,
which this package does not read: for this size give a byte-level tokenizer.json as tokenizer.path.
This package has not been trained to the end with these settings.
"""

from configs import d3pm_text8

FAMILIES = d3pm_text8.FAMILIES


def get_config(name):
    config = d3pm_text8.get_config(name)
    config.data = dict(
        name="public", dataset="lm1b", path=None, length=128, separate_documents=False
    )
    config.tokenizer = dict(name="bpe", path=None, hub="gpt2")
    return config
