"""MD4-S on OpenWebText: 1024 GPT-2 tokens, 12 x 768, batch 512, 1M steps.

The corpus is downloaded and tokenised once; `--mode prepare` does no more than that. Its last
100,000 documents are the test split, as in the literature. For other text give data.path, files of
any format that docs/data.md names, and data.test=0.05 if it is small.
"""

from configs import base


def get_config():
    config = base.get_config()
    config.data = dict(
        name="public",
        dataset="openwebtext",
        path=None,  # where the archive lies; None: in the cache directory, or download it
        length=1024,
        separate_documents=False,
        validation=0.001,
        test=100_000.0,
    )
    # path: a folder with GPT-2's encoder.json and vocab.bpe; None: download from the hub.
    config.tokenizer = dict(name="bpe", path=None, hub="gpt2")
    config.network.dtype = "bfloat16"
    config.optim.weight_decay = 0.03
    config.sample.steps = 1000
    return config
