"""Measures the tables of docs/results.md at one commit and writes the page.

    python tools/reproduce.py --out docs/results --data text8.zip
    python tools/reproduce.py --out docs/results --only speed,sampling
    python tools/reproduce.py --out docs/results --render

Each table is a file OUT/NAME.json with the raw numbers, the commands, the commit, the date and the
machine. The page is OUT.md. Finished tables are kept. An interrupted table continues at its next
row, if commit and machine are the same. --again remakes tables. --render only writes the page.
--quick uses tiny budgets to try the command; its numbers are meaningless, and the page says so. A
row that cannot be run is listed with the reason, and is retried by the next call. Run it on an
otherwise idle machine.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import program
from tables import TABLES, Settings, Table

from md4_jax.runtime.processor import multiplies_bfloat16

TUNABLES = "glibc.malloc.hugetlb=1"  # as launch/environment.sh sets it


def machine() -> dict[str, Any]:
    """Returns the processor, cores and versions that numbers depend on."""
    model = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        names = [line for line in facts.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        "bfloat16_products": multiplies_bfloat16(),
    }


def commit(out: Path) -> str:
    """Returns the commit, with '+' if files other than the tables and their page have changes."""

    def run(*words: str) -> str:
        command = ["git", "-C", str(program.ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    own = [f":(exclude){path}" for path in (out, out.with_suffix(".md"))
           if path.is_relative_to(program.ROOT)]  # fmt: skip
    changed = run("status", "--porcelain", "-uno", "--", str(program.ROOT), *own).strip()
    return run("rev-parse", "HEAD").strip() + ("+" if changed else "")


def measure(table: Table, path: Path, settings: Settings, head: dict[str, Any]) -> None:
    """Makes the missing rows of a table, writing its file after each."""
    made = json.loads(path.read_text()) if path.exists() else {"rows": {}, "finished": False}
    same = all(made.get(key) == head[key] for key in ("commit", "command", "machine"))
    done = {name: row for name, row in made["rows"].items() if "skipped" not in row}
    if made["finished"] and not (same and len(done) < len(made["rows"])):
        print(f"{path.stem}: kept, --again makes it anew", flush=True)
        return
    rows = done if same else {}
    made = {**head, "load_average": os.getloadavg()[0], "finished": False, "rows": rows}
    for row in table.rows(settings):
        if row.name in rows:
            continue
        print(f"{path.stem}: {row.name} ...", flush=True)
        try:
            rows[row.name] = row.run()
        except program.Refused as error:
            rows[row.name] = {"skipped": str(error)}
        save(path, made, settings)
    save(path, {**made, "finished": True}, settings)


def save(path: Path, made: dict[str, Any], settings: Settings) -> None:
    """Writes the file of a table, without local paths."""
    text = json.dumps(made, indent=1)
    if settings.data is not None:
        text = text.replace(str(settings.data), settings.data.name)
    text = text.replace(str(settings.workdir.parent), "runs/reproduce")
    path.write_text(text.replace(f"{program.ROOT}/", "") + "\n")


def page(out: Path) -> str:
    """Formats the page with all existing tables."""
    found = {name: out / f"{name}.json" for name in TABLES}
    made = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    parts = [HEAD.format(folder=out.name)]
    if any(table["quick"] for table in made.values()):
        parts.append(
            "> **A quick run.** Tables that say so were made with tiny budgets, to try the "
            "command. Their numbers mean nothing."
        )
    commits = {table["commit"] for table in made.values()}
    if len(commits) > 1:
        parts.append(f"> The tables come from {len(commits)} commits: see each of them.")
    parts += [section(name, made[name]) for name in made]
    absent = [name for name in TABLES if name not in made]
    if absent:
        parts.append(f"Not measured yet: {', '.join(absent)}.")
    return "\n\n".join(parts) + "\n"


HEAD = """# Results

This page is written by `python tools/reproduce.py`, which runs the program as a user does. Do not
edit it: change [tools/tables.py](../tools/tables.py), and write it again with `--render`. The raw
numbers and the command of every row are in [{folder}/]({folder}/). Bounds are marked `<=`, and
`+-` is one standard error. Compare speeds within one table only: machines differ."""


def _products(machine: dict[str, Any]) -> str:
    """Describes whether runs used bfloat16 products by default."""
    return "which multiply bfloat16, " if machine.get("bfloat16_products") else ""


def section(name: str, made: dict[str, Any]) -> str:
    """Formats one table, preceded by its description and followed by how it was made."""
    table, facts = TABLES[name], made["machine"]
    lines = [f"| | {' | '.join(table.head)} |", "|---" * (len(table.head) + 1) + "|"]
    for row, numbers in made["rows"].items():
        empty = [""] * (len(table.head) - 1)
        skipped = "skipped" in numbers
        cells = [numbers["skipped"], *empty] if skipped else table.cells(numbers)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    kind = "Quick run, m" if made["quick"] else "M"
    at = made["commit"][:12] + " with changes" * made["commit"].endswith("+")
    told = (
        f"{kind}ade by `{made['command']}` at commit {at} on {made['date']}: {facts['cores']} "
        f"cores of {facts['cpu']}, {_products(facts)}jax {facts['jax']}, "
        f"Python {facts['python']}, "
        f"load average {made['load_average']:.1f} at the start."
    )
    if not made["finished"]:
        told += " **Not finished**: the same command makes the rows that are missing."
    text, told = (textwrap.fill(words, 100, break_on_hyphens=False) for words in (table.text, told))
    return "\n\n".join([f"## {table.title}", text, "\n".join(lines), told])


def arguments() -> argparse.Namespace:
    """Parses and checks the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--only", default=",".join(TABLES), help="names of tables, with commas")
    parser.add_argument("--data", type=Path, help="the file of text8, or of its beginning")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of a recipe or family")
    parser.add_argument("--workdir", type=Path, default=Path("runs/reproduce"), help="of the runs")
    parser.add_argument("--quick", action="store_true", help="tiny budgets, to try the command")
    parser.add_argument("--again", action="store_true", help="make finished tables anew")
    parser.add_argument("--render", action="store_true", help="write the page alone")
    flags = parser.parse_args()
    unknown = set(flags.only.split(",")) - set(TABLES)
    if unknown:
        parser.error(f"unknown table {', '.join(sorted(unknown))}; known: {', '.join(TABLES)}")
    if flags.data is not None and not flags.data.is_file():
        parser.error(f"--data {flags.data} is no file")
    return flags


def main() -> None:
    flags = arguments()
    out, now = flags.out.absolute(), datetime.datetime.now(datetime.UTC)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GLIBC_TUNABLES", TUNABLES)
    words = " --quick" if flags.quick else ""
    words += f" --data {flags.data.name}" if flags.data else ""
    words += f" --seeds {flags.seeds}" if flags.seeds > 1 else ""
    where = flags.out.name if flags.out.is_absolute() else flags.out
    head = {
        "command": f"python tools/reproduce.py --out {where} --only NAME{words}",
        "commit": commit(out),
        "date": now.strftime("%Y-%m-%d"),
        "machine": machine(),
        "quick": flags.quick,
    }
    kind = f"{head['commit'][:12]}{'-quick' if flags.quick else ''}"
    for name in [] if flags.render else flags.only.split(","):
        path = out / f"{name}.json"
        if path.exists() and flags.again:
            path.unlink()
        # Without '..', since `save` looks for them in commands.
        runs = Path(os.path.abspath(flags.workdir / kind / name))
        data = None if flags.data is None else Path(os.path.abspath(flags.data))
        own = {**head, "command": head["command"].replace("NAME", name)}
        measure(TABLES[name], path, Settings(data, flags.quick, runs, flags.seeds), own)
    out.with_suffix(".md").write_text(page(out))
    print(out.with_suffix(".md"))


if __name__ == "__main__":
    main()
