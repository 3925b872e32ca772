"""MD4-S on OpenWebText (arXiv:2406.04329), as google-deepmind/md4: 165,857,344 parameters.

The corpus is downloaded and tokenised once; `--mode prepare` does only that. Its last 100,000
documents are the test split, as in the literature. For other text set data.path to files of any
format in docs/data.md, and data.test=0.05 if it is small.
"""

from configs import text8


def get_config():
    config = text8.get_config()
    config.data = dict(
        name="public",
        dataset="openwebtext",
        path=None,  # path of the archive; None: look in the cache, then download
        length=1024,
        separate_documents=False,
        validation=0.001,
        test=100_000.0,
    )
    # path: a folder with GPT-2's encoder.json and vocab.bpe; None: download from the hub.
    config.tokenizer = dict(name="bpe", path=None, hub="gpt2")
    config.network.update(embedding=0, dropout=0.02, attention_dropout=0.02, embedding_dropout=0.02)
    config.optim.learning_rate = 3e-4
    config.evals.validation.every = 10_000
    config.checkpoint.keep_every = 200_000
    return config
