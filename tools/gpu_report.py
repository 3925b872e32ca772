"""Times this package on a GPU: all rows of the table in one command, in about nine minutes.

    python tools/gpu_report.py --out docs/results/gpu.json [--seconds 480] [--only WORD]
    python tools/gpu_report.py --out text8.json --only none --text8 FILE   # ten minutes more
    python tools/gpu_report.py --dry        # without a GPU: lowers each training step for CUDA

A row is one `--mode bench` in a separate process. Rows that exceed the memory or the time are
listed with the reason. The fraction of the rate compares the FLOPs of the network's formula with a
bf16 product of 8192 x 8192 x 8192, timed between the windows of the same run. The last row lists
the slowest operations. Finally the losses of a few steps on the GPU and on the CPU are compared.
With --text8, configs/text8_gpu.py then trains on this file for ten minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import program

from md4_jax.perf import names

WORDS = "bench.random_tokens=50257"
CHARACTERS = "bench.random_tokens=27"
NARROW = "network.dtype=bfloat16"
PLAIN = "network.dropout=0 network.attention_dropout=0 network.embedding_dropout=0"
NAMES = "bench.names=30"  # what takes the time
# Without microbatches, and with a batch that fits into 80 GB.
MD4_S = f"{WORDS} {NARROW} train.batch_size=32 train.microbatches=1"


class Row(NamedTuple):
    """One row: its name, and config, part and keys of the benchmark."""

    name: str
    config: str
    part: str
    keys: str


ROWS = (
    Row("MD4-S, 1024 tokens, no dropout", "configs/owt.py", "train", f"{MD4_S} {PLAIN}"),
    Row("MD4-S as published, dropout of 0.02", "configs/owt.py", "train", MD4_S),
    Row("MDLM's network, no dropout", "configs/mdlm_owt.py", "train", f"{MD4_S} {PLAIN}"),
    Row("MD4-S, evaluation", "configs/owt.py", "eval", f"{MD4_S} evals.test.batch_size=32"),
    Row(
        "MD4-S, samples of 128 steps", "configs/owt.py", "sample",
        f"{MD4_S} sample.batch_size=16 sample.steps=128",
    ),
    Row(
        "text8, 12 x 768, 256 characters", "configs/text8.py", "train",
        f"{CHARACTERS} {NARROW} train.batch_size=256 train.microbatches=1",
    ),
    Row(
        "block diffusion, 1024 tokens, no dropout", "configs/block_owt.py", "train",
        f"{WORDS} {NARROW} train.batch_size=16 train.microbatches=1 {PLAIN}",
    ),
    Row(
        "its samples, with a memory", "configs/block_owt.py", "sample",
        f"{WORDS} {NARROW} sample.batch_size=16 sample.length=1024",
    ),
    Row(
        "U-Net, 32 x 32 x 3 pixels", "configs/cifar10.py", "train",
        f"bench.random_tokens=256 {NARROW} train.batch_size=64 train.microbatches=1",
    ),
    Row(
        "GenMD4, text8", "configs/genmd4_text8.py", "train",
        f"{CHARACTERS} {NARROW} train.batch_size=128 train.microbatches=1",
    ),
    Row(
        "MD4-S, no dropout, attention without a kernel", "configs/owt.py", "train",
        f"{MD4_S} {PLAIN} network.attention=plain",
    ),
    Row("MD4-S, no dropout, by name", "configs/owt.py", "train", f"{MD4_S} {PLAIN} {NAMES}"),
)  # fmt: skip
LOSSES = (
    "data.name=shakespeare data.windows=grid tokenizer.name=characters data.length=64 "
    "network.size=128 network.depth=2 network.heads=2 train.num_steps=20 optim.warmup_steps=2 "
    "log.every=1 train.batch_size=16 train.microbatches=1 evals.validation.every=0 "
    "sample.num=1 sample.steps=8 log.trackers="
)


def timed(row: Row) -> dict[str, Any]:
    """Times a row in a separate process; {"error": reason} if it fails."""
    words = program.bench_words(row.config, row.keys, row.part, 3, 0.7)
    command = [sys.executable, "-m", "md4_jax", *words]
    environment = dict(os.environ)
    if NAMES in row.keys:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {names.GRAPHS}".strip()
    ended = subprocess.run(
        command, cwd=program.ROOT, env=environment, capture_output=True, text=True
    )
    said = {"command": program.written(words)}
    if ended.returncode:
        return {**said, "error": (ended.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    return {**said, "device": found["device"], "commit": found["commit"], **found[row.part]}


def losses() -> dict[str, Any]:
    """Returns the largest relative difference of 20 losses on the GPU and on the CPU, float32."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for platform in ("cuda", "cpu"):
            workdir = Path(folder) / platform
            words = program.config_words("configs/text8.py", LOSSES)
            # The default on GPUs rounds operands to TensorFloat-32.
            exact = {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "JAX_PLATFORMS": platform}
            program.call([*words, f"--workdir={workdir}"], **exact)
            rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
            found.append([row["train_bits_per_token"] for row in rows if "grad_norm" in row])
    pairs = list(zip(*found, strict=True))
    return {"difference": max(abs(a / b - 1) for a, b in pairs), "steps": len(pairs)}


def learned(text: Path) -> dict[str, Any]:
    """Trains text8_gpu.py on a text for ten minutes; returns the evaluation of the test split."""
    keys = f"data.path={text.resolve()} log.trackers="
    words = program.config_words("configs/text8_gpu.py", keys)
    with tempfile.TemporaryDirectory() as folder:
        found = program.train(words, Path(folder) / "run")
    names = ("step", "bits_per_character", "bits_per_character_se", "commit")
    return {"command": program.written(words), **{name: found[name] for name in names}}


def lowered(row: Row) -> dict[str, Any]:
    """Lowers the training step of a row for CUDA, with the kernels that a GPU would get."""
    import jax
    from jax._src.cudnn import fused_attention_stablehlo

    from md4_jax.config import build, inputs, schema
    from md4_jax.perf.bench import _batch
    from md4_jax.training.loop import abstract_state
    from md4_jax.training.step import make_train_step

    # Lowering queries the version of the library, which is absent here.
    fused_attention_stablehlo.check_cudnn_version = lambda: 91000
    keys = dict(word.split("=", 1) for word in f"{row.keys} bench.parts=train".split())
    keys |= {"train.batch_size": "2"}
    asked = schema.load_config(str(program.ROOT / row.config), keys)
    if asked["network"].get("attention") == "auto" and not asked["network"]["attention_dropout"]:
        asked["network"]["attention"] = "cudnn"
    experiment = build.experiment(asked, inputs.random_tokens(asked, "bench"))
    step = make_train_step(
        experiment.network, experiment.objective, experiment.optimizer, experiment.train
    )
    with jax.set_mesh(experiment.mesh):
        traced = jax.jit(step).trace(abstract_state(experiment), _batch(experiment, 2))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return {"operations": text.count(" stablehlo."), "cudnn": text.count("@__cudnn")}


def line(name: str, n: dict[str, Any]) -> str:
    """Formats a row of the table."""
    if "error" in n:
        return f"| {name} | {n['error']} | | | | |"
    return (
        f"| {name} | {n['seconds']:.4g} ({n['seconds_min']:.4g}-{n['seconds_max']:.4g}) "
        f"| {n['tokens_per_second']:,.0f} | {n.get('model_utilisation', float('nan')):.0%} "
        f"| {n.get('matrix_gflops', float('nan')) / 1e3:,.0f} "
        f"| {n.get('peak_device_gib', float('nan')):.1f} |"
    )


def report(options: argparse.Namespace) -> None:
    """Times the rows one by one, printing each and rewriting the file after it."""
    began, found = time.monotonic(), {}
    print(
        "| | seconds (min-max) | tokens/s | of the rate | rate, TFLOP/s | peak GiB |\n"
        + "|---" * 6 + "|"
    )  # fmt: skip
    for row in ROWS:
        if options.only not in row.name:
            continue
        if time.monotonic() - began > options.seconds:
            found[row.name] = {"error": f"not begun within --seconds {options.seconds:.0f}"}
        else:
            found[row.name] = timed(row)
        print(line(row.name, found[row.name]), flush=True)
        if "names" in found[row.name]:
            print("\n" + names.table(row.part, found[row.name]["names"]), flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    ends = {
        "losses": (losses, "losses of {steps} steps: GPU / CPU - 1 at most {difference:.1e}"),
        "text8": (
            lambda: learned(options.text8),
            "ten minutes of text8: <= {bits_per_character:.3f} +- {bits_per_character_se:.3f} bits "
            "a character, {step:,} steps",
        ),
    }
    asked = {"losses": options.only in "losses", "text8": options.text8 is not None}
    for name, (measure, text) in ends.items():
        if not asked[name]:
            continue
        try:
            found[name] = measure()
        except (program.Refused, SystemExit) as error:
            found[name], text = {"error": str(error)}, f"{name}: {{error}}"
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print("\n" + text.format(**found[name]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no row after them")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--text8", type=Path, help="train on this text for ten minutes, too")
    parser.add_argument("--dry", action="store_true", help="lower for CUDA; needs no GPU")
    options = parser.parse_args()
    if not options.dry:
        return report(options)
    for row in ROWS:
        if row.part == "train" and options.only in row.name:
            facts = lowered(row)
            print(f"{row.name}: {facts['operations']} operations, {facts['cudnn']} calls of cuDNN")


if __name__ == "__main__":
    main()
