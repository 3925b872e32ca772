"""MD4-S on OpenWebText (arXiv:2406.04329), as google-deepmind/md4: 165,857,344 parameters.

data.path is a glob of .jsonl files with lines {"text": ...}. The last 100,000 documents of the full
set are the test split, as in the literature. For a small set give data.test=0.05.
"""

from configs import text8


def get_config():
    config = text8.get_config()
    config.data = dict(
        name="text",
        path="data/openwebtext/*.jsonl",
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
    return config
