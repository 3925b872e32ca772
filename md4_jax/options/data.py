"""Keys of the `data` section that every source has."""

import dataclasses

from md4_jax.protocols import UserError


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Keys of the `data` section for every source.

    length              tokens of one sequence
    separate_documents  whether attention stays within a document if several are packed into a
                        sequence
    windows             sequences: "grid" cuts the token stream into adjacent windows, "every" takes
                        a window at every offset in training, "documents" makes one sequence of each
                        document, cut or padded
    padding             padding of a sequence with one document: "hidden" tokens, which do not
                        count, or "end_of_text" tokens, which do
    turns               answers of a conversation (messages_key) that count: "all", the "last" one,
                        or "each" in a separate sequence that ends with this answer
    chat_template       file of the chat template that formats conversations, or a folder that
                        contains one. "": the tokenizer's
    store               directory for the tokens of large texts, also gs://, so that all machines of
                        a pod use the tokens made by one. "": the cache directory
    detokenise          name of the rules of data/detokenise.py that turn the tokens of a corpus
                        back into text: wikitext, ptb, lm1b, lambada, scientific_papers. "": none
    autoencoder         folder of an autoencoder that turns images into codes, or hf:OWNER/NAME or
                        hf:OWNER/NAME/FOLDER on the hub. "": the symbols are pixels
    autoencoder_pixels  values of black and white that the autoencoder reads: "unit", 0 and 1;
                        "signed", -1 and 1; "auto": those of its kind
    """

    length: int = 256
    separate_documents: bool = False
    windows: str = "grid"
    padding: str = "hidden"
    turns: str = "all"
    chat_template: str = ""
    store: str = ""
    detokenise: str = ""
    autoencoder: str = ""
    autoencoder_pixels: str = "auto"

    def __post_init__(self):
        if self.windows not in ("grid", "every", "documents"):
            raise UserError(
                f"data.windows must be 'grid', 'every' or 'documents', not {self.windows!r}"
            )
        if self.padding not in ("hidden", "end_of_text"):
            raise UserError(f"data.padding must be 'hidden' or 'end_of_text', not {self.padding!r}")
        if self.turns not in ("all", "last", "each"):
            raise UserError(f"data.turns must be 'all', 'last' or 'each', not {self.turns!r}")
        if self.length < 2:
            raise UserError(f"data.length must be at least 2, not {self.length}")
