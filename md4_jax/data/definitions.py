"""Files of vocabularies that other programs read: a tokenizer.json, or ESM's vocab.txt."""

import json
from typing import Any

from md4_jax.data.bpe_files import CONFIG, byte_of_character
from md4_jax.data.proteins import ENTRIES, Proteins

# Options of transformers' EsmTokenizer for the vocabulary beside it.
ESM = {
    "tokenizer_class": "EsmTokenizer", "cls_token": "<cls>", "eos_token": "<eos>",
    "mask_token": "<mask>", "pad_token": "<pad>", "unk_token": "<unk>",
}  # fmt: skip


def files_of(tokenizer: Any) -> dict[str, str]:
    """Returns {file name: text} of a vocabulary; {} if it has no such format."""
    if isinstance(tokenizer, Proteins):
        return {"vocab.txt": "\n".join(ENTRIES), CONFIG: json.dumps(ESM)}
    definition = definition_of(tokenizer)
    return {"tokenizer.json": definition} if definition else {}


def definition_of(tokenizer: Any) -> str:
    """Returns the contents of a tokenizer.json; "" if the vocabulary has no such format.

    Byte-pair encodings already have one. Characters and bytes become a BPE model without merges.
    """
    fields = json.loads(tokenizer.to_json())
    if "definition" in fields:
        return fields["definition"]
    if getattr(tokenizer, "is_character", False):
        return _unmerged([tokenizer.decode([i]) for i in range(tokenizer.vocab_size)])
    spelled = tokenizer.spellings() or []
    plain = [text for i, text in enumerate(spelled) if i != tokenizer.eot_id]
    if not plain or any(len(text) != 1 for text in plain) or tokenizer.eot_id != len(plain):
        return ""
    shown = {byte: character for character, byte in byte_of_character().items()}
    entries = [shown[text[0]] for text in plain]
    return _unmerged(entries, end=spelled[tokenizer.eot_id].decode())


def _unmerged(entries: list[str], end: str = "") -> str:
    """Returns a BPE vocabulary without merges: of characters, or of the characters for bytes.

    end: special token after them; "": there is none, and the entries are not bytes
    """
    added = {
        "id": len(entries), "content": end, "single_word": False, "lstrip": False,
        "rstrip": False, "normalized": False, "special": True,
    }  # fmt: skip
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False
    }  # fmt: skip
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {entry: number for number, entry in enumerate(entries)}, "merges": [],
    }  # fmt: skip
    fields = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added] if end else [], "normalizer": None,
        "pre_tokenizer": byte_level if end else None, "post_processor": None,
        "decoder": byte_level if end else {"type": "Fuse"}, "model": model,
    }  # fmt: skip
    return json.dumps(fields, ensure_ascii=False)
