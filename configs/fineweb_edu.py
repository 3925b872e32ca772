"""MD4 on FineWeb-Edu (arXiv:2406.04329), as google-deepmind/md4: 165,857,344 parameters.

There is no published result of the reference on this data. The corpus is the sample of 10 billion
tokens, downloaded and tokenised once; the last 0.1% of its pages are the test split.
"""

from configs import owt


def get_config():
    config = owt.get_config()
    config.data = dict(
        name="public", dataset="fineweb_edu", path=None, length=1024, separate_documents=False
    )
    return config
