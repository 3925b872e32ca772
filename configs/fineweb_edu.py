"""MD4 on FineWeb-Edu (arXiv:2406.04329), as google-deepmind/md4: 165,857,344 parameters.

Its own code publishes no number for this data. The corpus is the sample of 10 billion tokens,
downloaded and tokenised once; its last 0.1% of pages are the test split.
"""

from configs import owt


def get_config():
    config = owt.get_config()
    config.data = dict(
        name="public", dataset="fineweb_edu", path=None, length=1024, separate_documents=False
    )
    return config
