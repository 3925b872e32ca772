"""Mutation testing: changes the package one line at a time and checks that tests fail.

The faults are in mutants.toml. Each is made in a copy of the checkout, where its tests run, the
quick ones first. A fault that no test notices shows a gap in the tests.

    python tools/mutants.py --check --out mutants.json
    python tools/mutants.py --table mutants.json
"""

import argparse
import concurrent.futures
import json
import os
import queue
import signal
import sys
import tempfile
import tomllib
from pathlib import Path

from mutant_copies import RUNNING, ask, copy_checkout, kill, test_file

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).with_name("mutants.toml")


def load() -> list[dict]:
    """Reads the faults; SystemExit lists all mistakes in the file."""
    mutants = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["mutant"]
    names = [m["name"] for m in mutants]
    wrong = [f"{m['name']} ({m['file']}): {w}" for m in mutants for w in mistakes(m)]
    wrong += [f"{name}: a name that is there twice" for name in names if names.count(name) > 1]
    lines = [(m["file"], m["before"]) for m in mutants]
    wrong += [
        f"{name}: `before` is that of another fault too"
        for name, line in zip(names, lines, strict=True)
        if lines.count(line) > 1
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))
    return mutants


def mistakes(mutant: dict) -> list[str]:
    """Describes the mistakes in the entry of one fault."""
    if not (ROOT / mutant["file"]).is_file():
        return ["there is no such file"]
    text = (ROOT / mutant["file"]).read_text(encoding="utf-8")
    wrong = [f"{t} does not exist" for t in mutant["tests"] if not test_file(ROOT, t).is_file()]
    same = mutant["before"] == mutant["after"]
    wrong += ["not a change of one line"] * (same or "\n" in mutant["before"] + mutant["after"])
    if (found := text.count(mutant["before"])) != 1:
        return [*wrong, f"`before` is there {found} times, not once"]
    try:
        compile(text.replace(mutant["before"], mutant["after"]), mutant["file"], "exec")
        return wrong
    except SyntaxError as error:
        return [*wrong, f"is no Python: {error}"]


def try_out(copies: queue.Queue, mutant: dict, options: argparse.Namespace) -> dict:
    """Makes one fault in a free copy, runs its tests and undoes the fault."""
    copy = copies.get()
    try:
        file, text = copy / mutant["file"], (ROOT / mutant["file"]).read_text(encoding="utf-8")
        file.write_text(text.replace(mutant["before"], mutant["after"]), encoding="utf-8")
        try:
            return {"file": mutant["file"], **ask(copy, mutant["tests"], options)}
        finally:
            file.write_text(text, encoding="utf-8")
    finally:
        copies.put(copy)


def check(copies: queue.Queue, mutants: list[dict], options: argparse.Namespace) -> list[str]:
    """Runs each test file on the unchanged code; returns those that fail."""
    tests = dict.fromkeys(test for mutant in mutants for test in mutant["tests"])
    print(f"{len(tests)} files of tests on the code as it is: each should pass, so escape")
    same = {"file": "md4_jax/__init__.py", "before": "", "after": ""}
    found = each(copies, [{**same, "name": t, "tests": [t]} for t in tests], options)
    return [f"{name}: {result['by']}" for name, result in found if result["status"] != "escaped"]


def each(copies: queue.Queue, mutants: list[dict], options: argparse.Namespace):
    """Yields (name, result) of each fault when done, and prints a line."""
    pool = concurrent.futures.ThreadPoolExecutor(options.workers)
    try:
        waits = {pool.submit(try_out, copies, m, options): m["name"] for m in mutants}
        for wait in concurrent.futures.as_completed(waits):
            result, name = wait.result(), waits[wait]
            word = "ESCAPED" if result["status"] == "escaped" else result["status"]
            by = f"  [{result['when']}] {result['by']}" if result["by"] else ""
            print(f"{word:8}{result['seconds']:5d} s  {name}{by}", flush=True)
            yield name, result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(RUNNING):
            kill(process)
        pool.shutdown()


def campaign(mutants: list[dict], options: argparse.Namespace) -> int:
    """Tries the faults, stores the results and returns the exit code."""
    kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    if options.resume:
        done = {name for name, result in kept.items() if result["status"] != "error"}
        mutants = [mutant for mutant in mutants if mutant["name"] not in done]
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copies: queue.Queue = queue.Queue()
        for number in range(options.workers):
            copies.put(copy_checkout(ROOT, Path(folder) / f"worker{number}", options.tests_from))
        if options.check and (failed := check(copies, mutants, options)):
            print("not begun: tests fail on the code as it is", *failed, sep="\n")
            return 2
        found = {}
        for name, result in each(copies, mutants, options):
            found[name] = result
            if options.out:
                write(options.out, kept | found)
    print(summary(found))
    codes = {"seen": 0, "escaped": 1, "error": 2}
    return max((codes[result["status"]] for result in found.values()), default=0)


def write(path: Path, results: dict) -> None:
    """Writes the results atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


def summary(results: dict[str, dict]) -> str:
    """Formats '12 of 13 seen; escaped: ...'."""
    line = f"{sum(r['status'] == 'seen' for r in results.values())} of {len(results)} seen"
    for status in ("escaped", "error"):
        names = ", ".join(name for name, r in results.items() if r["status"] == status)
        line += f"; {status}: {names}" if names else ""
    return line


def table(now: dict[str, dict], before: dict[str, dict] | None = None) -> str:
    """Formats results as a Markdown table, next to those of an older run if given."""
    columns = [now] if before is None else [before, now]
    heads = "seen by" if before is None else "before | now"
    lines = [f"| fault | file | {heads} |", "|---" * (2 + len(columns)) + "|"]
    for name, result in now.items():
        cells = [name, result["file"], *(cell(column.get(name)) for column in columns)]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    lines += ["", *([f"before: {summary(before)}  "] if before else []), summary(now)]
    return "\n".join(lines)


def cell(result: dict | None) -> str:
    """Formats one result: the test that noticed the fault, or that none did."""
    if not result or result["status"] != "seen":
        return f"**{result['status']}**" if result else "not tried"
    return result["by"] + (f" ({result['when']})" if result["when"] != "quick" else "")


def chosen(mutants: list[dict], options: argparse.Namespace) -> list[dict]:
    """Selects the requested faults, without those that no test could notice."""
    words = [word.strip() for word in options.only.split(",")]
    found = [m for m in mutants if any(w in m["name"] or w in m["file"] for w in words)]
    part, parts = map(int, options.part.split("/"))
    return [m for m in found if "equivalent" not in m][part - 1 :: parts]


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--workers", type=int, default=os.cpu_count(), help="copies at work at once")
    add("--timeout", type=float, default=600.0, help="seconds of one call of pytest")
    add("--only", default="", help="parts of names or files, with commas between")
    add("--part", default="1/1", help="I/N: every N-th fault, beginning with the I-th")
    add(
        "--tests-from",
        type=lambda text: Path(text).resolve(),
        help="another checkout, whose tests are asked",
    )
    add("--quick", action="store_true", help="leave out the tests marked slow or campaign")
    add("--check", action="store_true", help="begin with the tests on the code as it is")
    add("--out", type=Path, help="file of results, added to")
    add("--resume", action="store_true", help="skip what --out has")
    add("--list", action="store_true", help="check the faults and print them")
    add("--table", type=Path, nargs="+", help="results [older results]: print a Markdown table")
    return parser.parse_args()


def main() -> int:
    """Runs the command line and returns the exit code."""
    options = parse()
    if options.table:
        print(table(*(json.loads(path.read_text()) for path in options.table)))
        return 0
    mutants = chosen(load(), options)
    if options.list:
        print(
            *(f"{m['name']:<70} {m['file']}" for m in mutants), f"{len(mutants)} faults", sep="\n"
        )
        return 0
    return campaign(mutants, options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running tests are killed
    sys.exit(main())
