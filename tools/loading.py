"""Measures the memory for loading a sharded checkpoint onto a mesh.

    python tools/loading.py [--gigabytes 2] [--shards 8] [--devices 4]

Makes a random float32 RADD checkpoint in a temporary folder and loads it in a new process, onto a
mesh of emulated CPU devices that splits it over `tensor`. Prints a line of JSON: bytes of the
parameters and of the largest shard, and the peak resident memory minus that before loading.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

DEPTH = 32


def make(folder: Path, gigabytes: float, shards: int) -> None:
    """Writes the checkpoint, shard by shard."""
    from safetensors.numpy import save_file

    size = max(128, int((gigabytes * 2**30 / 4 / DEPTH / 12) ** 0.5) // 128 * 128)
    shapes = {
        "vocab_embed.embedding": (12, size),
        "output_layer.linear.weight": (12, size),
        "output_layer.linear.bias": (12,),
        "output_layer.norm_final.weight": (size,),
    }
    for n in range(DEPTH):
        block = {
            "attn_qkv.weight": (3 * size, size), "attn_out.weight": (size, size),
            "mlp.0.weight": (4 * size, size), "mlp.0.bias": (4 * size,),
            "mlp.2.weight": (size, 4 * size), "mlp.2.bias": (size,),
            "norm1.weight": (size,), "norm1.bias": (size,),
            "norm2.weight": (size,), "norm2.bias": (size,),
        }  # fmt: skip
        shapes |= {f"blocks.{n}.{name}": shape for name, shape in block.items()}
    shapes["output_layer.norm_final.bias"] = (size,)
    each, where, rng = -(-len(shapes) // shards), {}, np.random.default_rng(0)
    for number in range(shards):
        names = list(shapes)[number * each : (number + 1) * each]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file({n: rng.random(shapes[n], np.float32) for n in names}, folder / file)
        where |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps({"n_heads": size // 64, "length": 16}))


def resident(key: str) -> int:
    """Returns VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def load(folder: Path, tiny: Path, devices: int) -> None:
    """Loads a tiny checkpoint, for the fixed memory of a process, and then the other one."""
    import jax

    import md4_jax

    config = {"mesh.data": 1, "mesh.tensor": devices, "tokenizer.name": "characters"}
    config["tokenizer.alphabet"] = "abcdefghijk"
    md4_jax.load(tiny, config)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model = md4_jax.load(folder, config)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    peak = resident("VmHWM") - before
    found = {"parameters": params, "largest_shard": max(sizes), "peak": peak}
    print(json.dumps(found | {"limit": int(params + 1.5 * max(sizes))}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--load", nargs=2, type=Path)
    flags = parser.parse_args()
    if flags.load:
        load(*flags.load, flags.devices)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in ("large", "tiny")]
        for folder, gigabytes in zip(folders, (flags.gigabytes, 0.0), strict=True):
            folder.mkdir()
            make(folder, gigabytes, flags.shards)
        flag = f"--xla_force_host_platform_device_count={flags.devices}"
        environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, "--load", *map(str, folders)]
        command += ["--devices", str(flags.devices)]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
