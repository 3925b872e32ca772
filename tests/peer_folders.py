"""Folders in the layout of published checkpoints, around the tiny networks of tests/published."""

import json
import shutil
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file

from md4_jax import main

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
    "proseco": dict(SIZES, architectures=["Proseco"], model_type="proseco", cfg=False),
    "mdm_prime": {},
    "bd3lm": dict(SIZES, architectures=["BD3LM"], model_type="bd3lm", block_size=4, adaln=True),
    "esolm": dict(SIZES, model_type="esolm", time_conditioning=False, alpha_0=0.25),
    "duo": dict(SIZES, architectures=["DUO"], model_type="DUO", var_min=True),
    "udlm": dict(SIZES, architectures=["UDLM"], model_type="udlm", cfg=False, cfg_num_classes=-1),
    "udlm_labels": dict(
        SIZES, architectures=["UDLM"], model_type="udlm", cfg=True, cfg_num_classes=3
    ),
    "smdm": dict(n_head=4),
    "smdm_ar": dict(n_head=4),
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
    "dream": {},
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "sdar": {},
    "fast_dllm_v2": dict(mask_token_id=123),
    "lladamoe": {},
    "llada2": {},
    "qwen3moe": {},
    "sdarmoe": {},
    "e2d2": {},
    "e2d2_shared": {},
    "stable_diffcoder": dict(architectures=["StableDiffcoderForCausalLM"]),
    "rnd1": {},
    "coda": {},
    "sdlm": {},
    "nemotron": {},
    "wedlm": {},
    "diffullama": dict(mask_token_id=81),
    "modernbert": dict(mask_token_id=122),
    "lfm2": dict(mask_token_id=122),
    "diffusiongemma": {},
    "esm": dict(dplm_type="dplm_esm"),
    "gpt2": {},
    "diffugpt": dict(mask_token_id=119),
    "md4_text": dict(data_shape=[16]),
    "md4_text_outside_embed": dict(data_shape=[16]),
    "md4_text_time_free": dict(data_shape=[16]),
}  # fmt: skip
# Those in the layout of transformers' Llama and Qwen.
DECODERS = (
    "dream", "qwen2", "qwen3", "llama", "sdar", "fast_dllm_v2", "qwen3moe", "sdarmoe", "rnd1",
    "coda", "sdlm", "diffullama", "nemotron", "stable_diffcoder", "wedlm",
)  # fmt: skip
GPTS = ("gpt2", "diffugpt")
# Instances with the arrays of another one.
ARRAYS = {
    "esolm": "mdlm", "proseco": "mdlm", "rnd1": "qwen3moe", "stable_diffcoder": "llama",
    "wedlm": "qwen3",
}  # fmt: skip
# Letters and special entries of the vocabulary.
OTHERS = ("lladamoe", "llada2", "modernbert", "lfm2", "diffusiongemma", "esm", "e2d2")
PROTEINS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-"]
PROTEINS += ["<null_1>", "<mask>"]
ENTRIES = {
    "llada": (125, 3),
    **dict.fromkeys(("udlm", "udlm_labels", "smdm", "smdm_ar"), (12, 0)),
    **dict.fromkeys((*DECODERS, *GPTS, *OTHERS, "e2d2_shared"), (120, 4)),
}
# Printable characters that stand for themselves in a byte-level vocabulary.
LETTERS = "abcdefghijklmnopqrstuvwxyz" + "".join(map(chr, [*range(0x21, 0x61), *range(0xA1, 0xAD)]))
LETTERS += "".join(map(chr, range(0xAE, 0xC7)))[: 125 - len(LETTERS)]
# A chat: its special entries, the mask among them, and a template in the manner of LLaDA's.
MARKS = ("<|start|>", "<|endoftext|>", "<|mask|>", "<|role|>", "<|said|>", "<|eot_id|>")
TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|role|>{{ message['role'] }}<|said|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant<|said|>\n\n{% endif %}"
)


def answers(name: str) -> dict:
    """The inputs of an instance, and what its own project's code answers."""
    return json.loads((INSTANCES / f"{name}.json").read_text())


def peer_folder(directory: Path, name: str, **changes) -> Path:
    """Makes the folder of an instance, with `changes` of its config.json."""
    folder = directory / name
    folder.mkdir(parents=True)
    arrays = INSTANCES / f"{ARRAYS.get(name, name)}.safetensors"
    shutil.copy(arrays, folder / "model.safetensors")
    told = dict(TOLD[name])
    if name.startswith(("llada", "md4", *OTHERS, *DECODERS, *GPTS)):
        told = {**answers(name)["config"], **told}
    (folder / "config.json").write_text(json.dumps({**told, **changes}))
    if name == "esm":
        (folder / "vocab.txt").write_text("\n".join(PROTEINS))
        return folder
    letters, special = ENTRIES.get(name, (11, 0))
    tokenizer(letters, special).save(str(folder / "tokenizer.json"))
    return folder


def lora_folder(directory: Path, name: str, **changes) -> Path:
    """Makes the folder of an adapter of PEFT, with `changes` of its adapter_config.json."""
    folder = directory / name
    folder.mkdir(parents=True)
    shutil.copy(INSTANCES / f"{name}.safetensors", folder / "adapter_model.safetensors")
    told = {**answers(name)["config"], **changes}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def own_lora(directory: Path, base: Path, modules: dict[str, int], **told) -> Path:
    """Makes an adapter of random matrices for modules of a base, each with a rank."""
    held, rng, arrays = load_file(base / "model.safetensors"), np.random.default_rng(3), {}
    for module, rank in modules.items():
        out, into = held[f"{module}.weight"].shape
        for which, shape in (("A", (rank, into)), ("B", (out, rank))):
            values = rng.standard_normal(shape).astype(np.float32) / shape[1] ** 0.5
            arrays[f"base_model.model.{module}.lora_{which}.weight"] = values
    directory.mkdir()
    save_file(arrays, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "bias": "none", **told}
    told.setdefault("target_modules", sorted(modules))
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return directory


def tokenizer(letters: int, special: int = 0) -> tokenizers.Tokenizer:
    """A byte-level vocabulary of single characters, then special entries."""
    return byte_level(LETTERS[:letters], [f"<|special_{n}|>" for n in range(special)])


def byte_level(letters: str, special: list[str]) -> tokenizers.Tokenizer:
    """A byte-level vocabulary of these characters, then these special entries."""
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


def with_mask_at(folder: Path, mask: int, last: int = 125) -> Path:
    """Moves the row `last` of a LLaDA's tables to the row `mask`, and names it in config.json."""
    arrays = load_file(folder / "model.safetensors")
    for name in ("wte", "ff_out"):
        table = arrays[f"model.transformer.{name}.weight"]
        order = np.insert(np.delete(np.arange(len(table)), last), mask, last)
        arrays[f"model.transformer.{name}.weight"] = table[order]
    save_file(arrays, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "mask_token_id": mask}))
    return folder


def chat_folder(directory: Path, name: str = "chat") -> Path:
    """Makes the folder of a tiny chat model, whose mask (122) is followed by other entries."""
    folder = peer_folder(directory / name, "llada", mask_token_id=122)
    # The bytes of a line feed and of a space, then letters.
    byte_level("\u010a\u0120" + LETTERS[:118], MARKS).save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<|start|>", "eos_token": {"content": "<|endoftext|>"}}
    told = {**tokens, "chat_template": TEMPLATE, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def says_a_or_ends(folder: Path) -> None:
    """Changes the parameters so that each drawn token is 'a' or <|eot_id|>, with 1/2 each.

    Without the outputs of blocks the network sees only that a position is masked.
    """
    arrays = load_file(folder / "model.safetensors")
    for name, array in arrays.items():
        if name.endswith(("attn_out.weight", "ff_out.weight")):
            arrays[name] = np.zeros_like(array)
    table, head = (f"model.transformer.{name}.weight" for name in ("wte", "ff_out"))
    arrays[table][:] = np.eye(32, dtype=np.float32)[0]
    arrays["model.transformer.ln_f.weight"][:] = 1.0
    arrays[head][:, 0] = -100.0
    arrays[head][[2, 125], 0] = 1.0  # 'a' and <|eot_id|>
    save_file(arrays, folder / "model.safetensors")


def trained_on(folder, tmp_path, keys) -> Path:
    """The directory of a run that was made of a published model and trained for two steps."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("abcdefghijk" * 400)
    keys = {
        "train.num_steps": 2, "train.batch_size": 2, "optim.warmup_steps": 0, "log.every": 1,
        "evals.validation.every": 0, "evals.test.final": False, "evals.samples.final": False,
        "data.path": text, **keys,
    }  # fmt: skip
    flags = ["--mode", "import", "--from", str(folder), "--workdir", str(run)]
    assert main.run([*flags, *(f"--config.{key}={value}" for key, value in keys.items())]) == 0
    assert main.run(["--workdir", str(run)]) == 0
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(steps) == {1, 2}
    return run
