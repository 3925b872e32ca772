"""Times this package and other programs in turn, round by round, in one run on one machine.

    python tools/versus.py --out FILE [--rounds 5] [--seconds 600] NAME:CALLS=COMMAND ...

A COMMAND starts a worker, which speaks as `versus_worker.py` does; those of other projects run in
environments of their own. All are compiled and warm before the first round. In each round each is
called CALLS times, beside a matrix product that shows the speed of the machine. Calls during which
other programs disturbed are dropped. The table has the ratio of each to the first one, the median
and the range over rounds; FILE gets every call as JSON. For example, size (a):

    python tools/versus.py --out a.json "ours:3=python tools/versus_worker.py a train" \\
      "float32 of another:2=OTHER_PYTHON its_worker.py a"
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from versus_worker import DISTURBED

SIDE = 2048
PRODUCT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import json, jax, versus_worker
a = jax.random.normal(jax.random.key(0), ({SIDE}, {SIDE}))
product = jax.jit(lambda a: a @ a)
call = lambda: jax.block_until_ready(product(a))
call()
print("READY", flush=True)
for line in sys.stdin:
    if line.startswith("quit"):
        break
    print("TIMES", json.dumps(versus_worker.answer(call, int(line.split()[1]))), flush=True)
"""


class Program(NamedTuple):
    """A program under test: its process, its calls a round and what it said of itself."""

    process: subprocess.Popen
    calls: int
    facts: dict[str, float]


def start(command: list[str] | str, calls: int) -> Program:
    """Starts a worker and waits until it is ready; SystemExit if it ends before that."""
    process = subprocess.Popen(
        command, shell=isinstance(command, str), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    facts = {}
    for line in process.stdout:
        if line.startswith("INFO"):
            facts = json.loads(line.removeprefix("INFO"))
        if line.startswith("READY"):
            return Program(process, calls, facts)
    sys.exit(f"error: {command} ended with {process.wait()} before it was ready")


def ask(program: Program) -> dict[str, Any]:
    """Lets a worker run its calls; returns what it measured."""
    program.process.stdin.write(f"run {program.calls}\n")
    program.process.stdin.flush()
    for line in program.process.stdout:
        if line.startswith("TIMES"):
            return json.loads(line.removeprefix("TIMES"))
    sys.exit(f"error: {program.process.args} ended with {program.process.wait()} in a round")


def typical(answer: dict[str, Any]) -> float:
    """Returns the median seconds of the undisturbed calls, or of all if there is none."""
    quiet = [t for t, o in zip(answer["ts"], answer["oth"], strict=True) if o < DISTURBED]
    return statistics.median(quiet or answer["ts"])


def rounds(programs: dict[str, Program], most: int, seconds: float) -> dict[str, list[dict]]:
    """Returns the answers of each program, an entry a round; starts no round after the seconds."""
    found: dict[str, list[dict]] = {name: [] for name in programs}
    began = time.monotonic()
    for _ in range(most):
        for name, program in programs.items():
            found[name].append(ask(program))
        if time.monotonic() - began > seconds:
            break
    return found


def table(found: dict[str, list[dict]], programs: dict[str, Program]) -> str:
    """Formats medians, and the ratio of each program to the first one by round."""
    each = {name: [typical(answer) for answer in answers] for name, answers in found.items()}
    base = next(name for name in each if name != "product")
    rate = 2 * SIDE**3 / statistics.median(each["product"]) / 1e9
    lines = [
        f"{processor()}; matrix product {rate:.0f} GFLOP/s; {len(each[base])} rounds",
        f"| program | seconds (min-max of rounds) | / {base} (min-max of rounds) | peak GiB "
        "| temporaries MiB |",
        "|---|---|---|---|---|",
    ]
    for name, seconds in each.items():
        if name == "product":
            continue
        ratios = [a / b for a, b in zip(seconds, each[base], strict=True)]
        temporary = programs[name].facts.get("temp", float("nan"))
        lines.append(
            f"| {name} | {ranged(seconds, '.4f')} | {ranged(ratios, '.2f')} "
            f"| {max(answer['rss'] for answer in found[name]) / 2**20:.2f} | {temporary:,.0f} |"
        )
    return "\n".join(lines)


def ranged(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def processor() -> str:
    """Returns the name of the processor, as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="+", metavar="NAME:CALLS=COMMAND")
    parser.add_argument("--out", type=Path, required=True, help="file for every call, as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no round after them")
    options = parser.parse_args()
    programs = {"product": start([sys.executable, "-c", PRODUCT], 4)}
    for text in options.programs:
        label, mark, command = text.partition("=")
        name, colon, calls = label.rpartition(":")
        if not (mark and colon and calls.isdigit()):
            parser.error(f"{text!r} is not NAME:CALLS=COMMAND")
        programs[name] = start(command, int(calls))
    found = rounds(programs, options.rounds, options.seconds)
    for program in programs.values():
        program.process.communicate("quit\n")
    facts = {name: program.facts for name, program in programs.items()}
    options.out.write_text(
        json.dumps({"processor": processor(), "command": sys.argv, "facts": facts, "calls": found})
    )
    print(table(found, programs))


if __name__ == "__main__":
    main()
