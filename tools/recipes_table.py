"""Plans the training step of every published config, and writes the table of docs/recipes.md.

    python tools/recipes_table.py --topology v5e:8x8
    python tools/recipes_table.py --only owt,sedd_owt
    python tools/recipes_table.py --render

The configs are those of the first table of the page. Each is compiled at full size by --mode plan,
with increasing numbers of microbatches until it fits into the chip, and finally with parameters
split over 8 chips. The raw numbers are stored in docs/recipes.json, one entry per config. Existing
entries are kept unless --again is given. --render only writes the page. TPU topologies need libtpu.
"""

import argparse
import itertools
import json
import re
import sys
from typing import Any

import program

PAGE, KEPT = program.ROOT / "docs" / "recipes.md", program.ROOT / "docs" / "recipes.json"
MARKS = "<!-- the table below is written by tools/recipes_table.py -->\n", "\n<!-- end -->"
NAME = re.compile(r"`(\w+\.py(?::\w+)?)`")
# Vocabulary size of random tokens instead of data; 0: the config's own domain of images.
SYMBOLS = {"text8": 27, "cifar10": 0, "imagenet64": 0}
GPT2 = 50257
MICROBATCHES = (1, 2, 4, 8)
FSDP = (1, 8)
# Messages for too much memory, by the compiler and by its counts: GiB needed, GiB of the chip.
TOO_LARGE = re.compile(
    r"(?:Used |\(|needs )([\d.]+)"
    r"(?:G of |G\) exceeds available HBM \(| GiB on each chip, but a chip has )([\d.]+)"
)


def published() -> list[str]:
    """Returns the configs in the page's table of sources, in order."""
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return list(dict.fromkeys(name for row in rows for name in NAME.findall(row)))


def symbols(config: str) -> int:
    """Returns the vocabulary size of a config's data; 0 for images, which define it themselves."""
    return next((size for name, size in SYMBOLS.items() if name in config), GPT2)


def planned(config: str, topology: str) -> dict[str, Any]:
    """Compiles a config's training step; returns the numbers of the first variant that fits."""
    refused, least = "", dict.fromkeys(FSDP, 1.0)
    for fsdp, count in itertools.product(FSDP, MICROBATCHES):
        if count < least[fsdp]:
            continue
        try:
            made = numbers(config, topology, count, fsdp)
            return made | {"microbatches": count, "fsdp": fsdp, "refused": refused}
        except program.Refused as error:
            if not (found := TOO_LARGE.search(str(error))):
                raise
            refused = refused or str(error).partition(". Try ")[0]
            # A microbatch needs at least its fraction of the memory of the whole batch.
            least[fsdp] = count * float(found[1]) / float(found[2])
    return {"refused": refused}


def numbers(config: str, topology: str, microbatches: int, fsdp: int) -> dict[str, Any]:
    """Runs --mode plan with these microbatches and mesh.fsdp; returns its output."""
    keys = f"plan.parts=train plan.random_tokens={symbols(config)}"
    words = [
        "--mode=plan",
        f"--topology={topology}",
        *program.config_words(f"configs/{config}", keys),
    ]
    if fsdp > 1:
        words.append(f"--config.mesh.fsdp={fsdp}")
    if microbatches > 1:
        words.append(f"--config.train.microbatches={microbatches}")
    return program.numbers(words) | {"command": program.written(words)}


def table(kept: dict[str, Any]) -> str:
    """Formats the stored numbers as a Markdown table."""
    lines = [
        "| config | `train.microbatches` | GiB a chip: arguments, temporaries "
        "| TFLOP a chip and step | collectives MiB | compile s |",
        "|---" * 6 + "|",
    ]
    for name, facts in kept.items():
        if "train" not in facts:
            lines.append(f"| `{name}` | | does not fit: {facts['refused']} | | | |")
            continue
        train = facts["train"]
        memory = (train["arguments"] + train["outputs"], train["temporaries"])
        received = sum(size for _, size in train["collectives"].values()) / 2**20
        lines.append(
            f"| `{name}` | {facts['microbatches']}{_split(facts)} "
            f"| {', '.join(f'{size / 2**30:.1f}' for size in memory)} "
            f"| {train['flops'] / 1e12:.2f} | {received:,.0f} | {train['compile']:.0f} |"
        )
    return "\n".join(lines)


def _split(facts: dict[str, Any]) -> str:
    fsdp = facts.get("fsdp", 1)
    return f", `mesh.fsdp={fsdp}`" if fsdp > 1 else ""


def render(kept: dict[str, Any]) -> None:
    """Writes the table into the page, between its markers."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    absent = [f"`{name}`" for name in published() if name not in kept]
    missing = f"\nNot compiled yet: {', '.join(absent)}.\n" if absent else ""
    PAGE.write_text(f"{before}{MARKS[0]}\n{table(kept)}\n{missing}{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", default="v5e:8x8")
    parser.add_argument("--only", default="", help="files of configs: owt,sedd_owt")
    parser.add_argument("--again", action="store_true", help="make kept entries anew")
    parser.add_argument("--render", action="store_true", help="write the page alone")
    flags = parser.parse_args()
    names = published()
    only = [name for name in flags.only.split(",") if name]
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in [] if flags.render else names:
        if (only and name.partition(".")[0] not in only) or (name in kept and not flags.again):
            continue
        print(f"{name} ...", flush=True)
        try:
            kept[name] = planned(name, flags.topology)
        except program.Refused as error:
            sys.exit(f"error: {name}: {error}")
        kept = {key: kept[key] for key in names if key in kept}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    render(kept)
    print(table(kept))


if __name__ == "__main__":
    main()
