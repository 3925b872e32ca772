"""Compares the bytes received by a chip in a training step on several meshes with a formula.

    python tools/scaling.py --config configs/quickstart.py --topology cpu:8 -- ARGUMENTS

Every device of every mesh (data x fsdp x context x tensor) has --rows sequences (weak scaling), or
a part of them if `context` splits sequences. Each row is one run of --mode plan. In the formula P
is the bytes of the network's parameters, S = fsdp context the number of parts into which they are
split, and A the bytes of activations [rows, L, D] in float32:

    data      2 P / (S tensor) (data - 1) / data        all-reduce of the gradients
    S         3 P / tensor (S - 1) / S                  all-gather in both passes, reduce-scatter
    context   4 depth A / tensor (context - 1)/context  all-gather of keys and values, and
                                                        reduce-scatter of their gradients
    tensor    (7 depth + 2) 2 A / context               all-reduces: 2 of a block forward and 5
                  (tensor - 1) / tensor                 backward, of the embedding and the head
"""

import argparse
import os
import sys

import program

MESHES = (
    "1x1x1x1", "2x1x1x1", "4x1x1x1", "8x1x1x1", "1x2x1x1", "1x4x1x1", "1x8x1x1", "2x4x1x1",
    "1x1x2x1", "1x1x8x1", "1x1x1x2", "1x1x1x4", "2x1x1x4", "2x2x1x2",
)  # fmt: skip
Mesh = tuple[int, int, int, int]


def plan(flags: argparse.Namespace, mesh: Mesh) -> dict:
    """Runs --mode plan for one mesh and returns its numbers."""
    data, fsdp, context, tensor = mesh
    words = [f"--config={flags.config}", "--mode=plan", f"--topology={flags.topology}"]
    words += ["--config.plan.parts=train", f"--config.train.batch_size={flags.rows * data * fsdp}"]
    words += [f"--config.mesh.data={data}", f"--config.mesh.fsdp={fsdp}"]
    words += [f"--config.mesh.context={context}", f"--config.mesh.tensor={tensor}", *flags.extra]
    count = flags.topology.removeprefix("cpu:")
    forced = f"--xla_force_host_platform_device_count={count}" if count.isdigit() else ""
    try:
        return program.numbers(
            words, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {forced}".strip()
        )
    except program.Refused as error:
        sys.exit(f"error: {error}")


def formula(mesh: Mesh, rows: int, facts: dict) -> float:
    """Returns the bytes received by a device per step, by the formula above."""
    data, fsdp, context, tensor = mesh
    split = fsdp * context
    parameters = 4.0 * facts["parameters"]
    activations = 4.0 * rows * facts["length"] * facts["size"]
    return (
        2 * parameters / (split * tensor) * (data - 1) / data
        + 3 * parameters / tensor * (split - 1) / split
        + 4 * facts["depth"] * activations / tensor * (context - 1) / context
        + (7 * facts["depth"] + 2) * 2 * activations / context * (tensor - 1) / tensor
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--topology", default="cpu:8")
    parser.add_argument("--meshes", default=",".join(MESHES), help="data x fsdp x context x tensor")
    parser.add_argument("--rows", type=int, default=4, help="sequences of each device")
    parser.add_argument("extra", nargs="*", help="after --: passed on")
    flags = parser.parse_args()
    print("| mesh | counted MiB | formula MiB | ratio | of it |\n|---|---|---|---|---|")
    for text in flags.meshes.split(","):
        mesh = tuple(int(size) for size in text.split("x"))
        facts = plan(flags, mesh)
        kinds = facts["train"]["collectives"]
        counted = sum(size for _, size in kinds.values()) / 2**20
        expected = formula(mesh, flags.rows, facts) / 2**20
        ratio = f"{counted / expected:.2f}" if expected else ""
        of_it = ", ".join(f"{n} {k} {b / 2**20:.2f}" for k, (n, b) in sorted(kinds.items()))
        print(f"| {text} | {counted:.2f} | {expected:.2f} | {ratio} | {of_it} |", flush=True)
    print(f"\nmd4_jax {facts['commit']}, {facts['parameters']:,} parameters")


if __name__ == "__main__":
    main()
