"""Vocabulary of molecules in SMILES, such as UDLM's for QM9 (arXiv:2412.10193).

A regular expression splits a text into atoms, bonds, brackets and digits; text that it does not
match is dropped. The vocabulary consists of five special entries and the entries of a vocab.json.
"""

from collections.abc import Mapping

from md4_jax.protocols import UserError

FILE = "vocab.json"
# Classes in the tokenizer.py of kuleshov-group/discrete-diffusion-guidance.
CLASSES = ("SMILESTokenizer", "QM9Tokenizer", "Zinc250kTokenizer")
BEGIN, END, MASK, PADDING, UNKNOWN = SPECIAL = ("<bos>", "<eos>", "<mask>", "<pad>", "<unk>")
# Split of pschwllr/MolecularTransformer: atoms in square brackets, atoms without, the rest.
TOKEN = r"\[[^\]]+\]|Br?|Cl?|[NOSPFIbcnosp]|[().=#\-+\\/:~@?>*$]|%[0-9]{2}|[0-9]"


def tokenizer_of(entries: Mapping[str, int], origin: str):
    """Makes a `tokenizers.Tokenizer` from the contents of a vocab.json.

    UserError if the ids are not 0, 1, ..., or if it contains one of the five special entries.
    """
    import tokenizers

    held = sorted(set(SPECIAL) & entries.keys())
    if held:
        raise UserError(
            f"{origin} has the entry {held[0]!r}, but the tokenizer class adds this entry itself, "
            "before all others: use a vocab.json without it"
        )
    if sorted(entries.values()) != list(range(len(entries))):
        raise UserError(f"{origin}: the ids of its {len(entries)} entries must be 0, 1, 2, ...")
    ids = dict(zip(SPECIAL, range(len(SPECIAL)), strict=True))
    ids |= {entry: number + len(SPECIAL) for entry, number in entries.items()}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=UNKNOWN))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(TOKEN), "removed", invert=True
    )
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(list(SPECIAL))
    return made
