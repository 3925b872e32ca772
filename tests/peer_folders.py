"""Folders in the layout of published checkpoints, around the tiny networks of tests/published."""

import json
import shutil
from pathlib import Path

import tokenizers

INSTANCES = Path(__file__).parent / "published"
SIZES = dict(vocab_size=12, model_length=16, hidden_dim=32, cond_dim=16, n_blocks=2, n_heads=2)
SEDD = dict(
    ngpus=8, tokens=11, noise=dict(type="loglinear", sigma_min=1e-4, sigma_max=20),
    model=dict(
        name="small", type="ddit", hidden_size=32, cond_dim=16, length=16, n_blocks=2, n_heads=2,
        scale_by_sigma=True, dropout=0.1,
    ),
)  # fmt: skip
# Keys of each project's own config.json, with the sizes of the instances.
TOLD = {
    "mdlm": dict(SIZES, architectures=["MDLM"], model_type="mdlm", time_conditioning=False),
    "bd3lm": dict(SIZES, architectures=["BD3LM"], model_type="bd3lm", block_size=4, adaln=True),
    "duo": dict(SIZES, architectures=["DUO"], model_type="DUO", var_min=True),
    "sedd_absorb": dict(SEDD, graph=dict(type="absorb", file="data")),
    "sedd_uniform": dict(
        SEDD, graph=dict(type="uniform", file="data"),
        noise=dict(type="geometric", sigma_min=1e-4, sigma_max=20),
    ),
    "radd": dict(SEDD, training=dict(loss_type="lambda_DCE")),
    "gidd": dict(
        model_type="dit", architectures=["DIT"], vocab_size=12, max_seq_len=16, hidden_size=32,
        timestep_cond_dim=16, num_hidden_layers=2, num_attention_heads=2, attention_dropout=0.0,
        p_uniform=0.1, t_eps=1e-4,
    ),
    "llada": dict(model_type="llada", architectures=["LLaDAModelLM"]),
    "md4_text": dict(data_shape=[16]),
    "md4_text_outside_embed": dict(data_shape=[16]),
    "md4_text_time_free": dict(data_shape=[16]),
}  # fmt: skip
# Printable characters that stand for themselves in a byte-level vocabulary.
LETTERS = "abcdefghijklmnopqrstuvwxyz" + "".join(map(chr, [*range(0x21, 0x61), *range(0xA1, 0xAD)]))
LETTERS += "".join(map(chr, range(0xAE, 0xC7)))[: 125 - len(LETTERS)]


def answers(name: str) -> dict:
    """The inputs of an instance, and what its own project's code answers."""
    return json.loads((INSTANCES / f"{name}.json").read_text())


def peer_folder(directory: Path, name: str, **changes) -> Path:
    """Makes the folder of an instance, with `changes` of its config.json."""
    folder = directory / name
    folder.mkdir(parents=True)
    shutil.copy(INSTANCES / f"{name}.safetensors", folder / "model.safetensors")
    told = dict(TOLD[name])
    if name.startswith(("llada", "md4")):
        told = {**answers(name)["config"], **told}
    (folder / "config.json").write_text(json.dumps({**told, **changes}))
    is_llada = name == "llada"
    tokenizer(125 if is_llada else 11, 3 if is_llada else 0).save(str(folder / "tokenizer.json"))
    return folder


def tokenizer(letters: int, special: int = 0) -> tokenizers.Tokenizer:
    """A byte-level vocabulary of single characters, then special entries."""
    vocabulary = {letter: index for index, letter in enumerate(LETTERS[:letters])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([f"<|special_{n}|>" for n in range(special)])
    return made
