"""Tables of docs/results.md: the runs of each row, and the format of the cells.

Used by reproduce.py. A row is one run of the program, or a few, with their reported numbers.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import chain
import program
from sizes import SIZES, SMALL, TEXT

from configs.families import FAMILIES
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.processor import multiplies_bfloat16


class Settings(NamedTuple):
    """Settings of one call.

    data: a file with text8 or its beginning, None if there is none. quick: use tiny budgets, to try
    the command. workdir: the folder of the runs. seeds: number of runs per recipe and family.
    """

    data: Path | None
    quick: bool
    workdir: Path
    seeds: int


class Row(NamedTuple):
    """Row of a table: its name, and a function that makes {"commands": [...], named numbers}."""

    name: str
    run: Callable[[], dict[str, Any]]


class Table(NamedTuple):
    """One table.

    text: description for the page. rows: settings -> rows. head: names of the columns after the
    first. cells: numbers of a row -> these columns.
    """

    title: str
    text: str
    rows: Callable[[Settings], list[Row]]
    head: tuple[str, ...]
    cells: Callable[[dict[str, Any]], list[str]]


def _text8(settings: Settings) -> str:
    """Returns the keys that read the text8 file; raises Refused without one."""
    if settings.data is None:
        raise program.Refused("needs --data PATH, the file of text8 or of its beginning")
    return f"data.name=text8 data.path={settings.data}"


def _trained(
    words: list[str], workdir: Path, seeds: int, evaluation: str = "test"
) -> dict[str, Any]:
    """Trains once per seed; returns commands, final evaluations and minutes."""
    made: dict[str, Any] = {"commands": [], "runs": []}
    for seed in range(seeds):
        own = [*words, f"--config.train.seed={seed}"]
        began = time.monotonic()
        result = program.train(own, workdir / f"seed{seed}", evaluation)
        minutes = (time.monotonic() - began) / 60
        made["commands"].append(program.written(own))
        made["runs"].append({"seed": seed, "minutes": minutes, **result})
    return made


def _bits(run: dict[str, Any]) -> str:
    sign = "" if run["exact"] else "<= "
    return f"{sign}{run['bits_per_token']:.3f} +- {run['bits_per_token_se']:.3f}"


def _times(n: dict[str, float], scale: float = 1.0) -> str:
    """Formats the windows as 'median (minimum-maximum)'."""
    a, b, c = (scale * n[key] for key in ("seconds", "seconds_min", "seconds_max"))
    return f"{a:.4g} ({b:.4g}-{c:.4g})"


# First models


def _recipe_rows(settings: Settings) -> list[Row]:
    quick = "train.num_steps=30 optim.warmup_steps=3 evals.validation.every=0 "
    quick += "evals.test.draws=1 evals.ngrams.final=false sample.num=1"

    def row(name: str, keys: Callable[[], str] = str, evaluation: str = "test") -> Row:
        def run() -> dict[str, Any]:
            more = f"{keys()} {quick if settings.quick else ''}"
            words = program.config_words(f"configs/{name}.py", more)
            return _trained(words, settings.workdir / name, settings.seeds, evaluation)

        return Row(name, run)

    text8 = functools.partial(_text8, settings)
    return [
        row("quickstart"),
        row("text8_fast", text8),
        row("text8_tables", text8),
        row("digits", evaluation="unlabelled"),
    ]


def _recipe_cells(n: dict[str, Any]) -> list[str]:
    runs = n["runs"]
    return [
        ", ".join(_bits(run) for run in runs),
        ", ".join(f"{run['step']:,}" for run in runs),
        ", ".join(f"{run['minutes']:.1f}" for run in runs),
    ]


# Families


def _family_rows(settings: Settings) -> list[Row]:
    keys = "train.seconds=0 evals.validation.every=0 evals.test.draws=1 sample.num=1 "
    keys += "network.depth=2 optim.warmup_steps=100 train.num_steps=500"
    timed = "bench.parts=train bench.windows=5 bench.seconds=1.0"
    names = list(FAMILIES)
    if settings.quick:
        names = ["md4", "udlm", "ar"]
        keys += " train.num_steps=20 optim.warmup_steps=4 network.size=32 network.depth=1 "
        keys += "data.name=shakespeare data.length=64 tokenizer.name=characters sample.steps=4"
        timed = "bench.parts=train bench.windows=2 bench.seconds=0.1"

    def row(name: str) -> Row:
        def run() -> dict[str, Any]:
            more = keys if settings.quick else f"{keys} {_text8(settings)}"
            more += " objective.until=250" if name == "duo" else ""
            words = program.config_words(f"configs/families.py:{name}", more)
            made = _trained(words, settings.workdir / name, settings.seeds)
            words = ["--mode=bench", *words, *(f"--config.{key}" for key in timed.split())]
            made["commands"].append(program.written(words))
            return {**made, "bound": _bound(name), "train": program.numbers(words)["train"]}

        return Row(name, run)

    return [row(name) for name in names]


def _bound(family: str) -> str:
    """Returns the reported objective of a family."""
    _, objective, bound, *_ = FAMILIES[family]
    return objective if bound == "auto" else bound


def _family_cells(n: dict[str, Any]) -> list[str]:
    return [n["bound"], ", ".join(_bits(run) for run in n["runs"]), _times(n["train"], 1e3)]


# Speed

PRODUCTS = ("float32", "bfloat16")


def _speed_rows(settings: Settings) -> list[Row]:
    windows, seconds = (2, 0.05) if settings.quick else (5, 2.0)
    rows = []
    for name in "a" if settings.quick else "abc":
        keys = SIZES[name]
        if settings.quick:
            keys += " train.batch_size=2 sample.batch_size=2 sample.steps=4"
        for part in ("train", "eval", "sample"):
            for products in PRODUCTS[: 1 + multiplies_bfloat16()]:
                row, more = f"({name}) {part}, {products}", f"{keys} network.products={products}"
                rows.append(_bench_row(row, more, part, windows, seconds))
    return rows


def _bench_row(name: str, keys: str, part: str, windows: int, seconds: float) -> Row:
    words = program.bench_words("configs/base.py", keys, part, windows, seconds)

    def run() -> dict[str, Any]:
        return {"commands": [program.written(words)], **program.numbers(words)[part]}

    return Row(name, run)


def _speed_cells(n: dict[str, float]) -> list[str]:
    return [
        _times(n),
        f"{n['tokens_per_second']:,.0f}",
        f"{n['matrix_gflops']:.0f}",
        f"{n['model_utilisation']:.0%}",
        f"{n['temporary_mib']:,.0f}",
        f"{n['peak_rss_gib']:.2f}",
    ]


# Entropy


def _entropy_rows(settings: Settings) -> list[Row]:
    steps, test = (50, 512) if settings.quick else (800, 8192)
    keys = "network.size=32 network.depth=2 network.heads=2 network.hidden=64 train.seconds=0 "
    keys += f"train.num_steps={steps} train.batch_size=64 train.ema=0.98 optim.warmup_steps=20 "
    keys += "optim.learning_rate=0.02 optim.adam_learning_rate=0.01 evals.validation.every=0 "
    keys += "evals.test.draws=4 evals.test.batch_size=512 sample.num=1 sample.steps=4"

    def row(name: str) -> Row:
        def run() -> dict[str, Any]:
            source, nats = chain.write(settings.workdir / "chain.txt", 64 * steps, test)
            words = program.config_words(f"configs/families.py:{name}", f"{source} {keys}")
            words += [f"--config.{key}" for key in _chain_keys(name).split()]
            made = _trained(words, settings.workdir / name, 1)
            result = made["runs"][0]
            gap = result["nats_per_token"] - nats
            return {**made, "bound": _bound(name), "entropy": nats, "gap": gap,
                    "gap_se": result["nats_per_token_se"]}  # fmt: skip

        return Row(name, run)

    return [row(name) for name in (["md4", "udlm", "ar"] if settings.quick else FAMILIES)]


def _chain_keys(family: str) -> str:
    """Returns the keys of a family for sequences of twelve symbols with vocabulary size four."""
    if family in ("block", "e2d2"):
        return "objective.block=4"
    if family == "eso":
        return "network.local_width=0"
    if family == "d3pm_gauss":  # four symbols are far apart
        noise = "process.timesteps=64 process.beta_start=0.05 process.beta_end=1.0"
        return f"network.local_width=3 sample.steps=64 {noise}"
    if family == "duo":
        return "network.local_width=3 objective.until=400"
    return "network.local_width=3"


def _entropy_cells(n: dict[str, Any]) -> list[str]:
    return [n["bound"], f"{n['entropy']:.4f}", f"{n['gap']:.4f} +- {n['gap_se']:.4f}"]


# Sampling


def _sampling_rows(settings: Settings) -> list[Row]:
    windows, seconds = (2, 0.05) if settings.quick else (5, 1.0)
    grid = [(steps, 1) for steps in (1, 16, 64, 256, 1024)]
    grid += [(steps, 16) for steps in (16, 64, 256)]
    keys = f"{TEXT} {SMALL} network.scan_blocks=false network.time_conditioning=false "
    if settings.quick:
        grid = [(2, 1), (4, 2)]
        keys += "network.size=32 network.depth=1 network.heads=2 data.length=32 "
    rows = []
    for steps, batch in grid:
        more = f"{keys}sample.steps={steps} sample.batch_size={batch} sample.grid=uniform"
        name = f"{amount(steps, 'step')}, batch {batch}"
        rows.append(_bench_row(name, more, "sample", windows, seconds))
    return rows


def _sampling_cells(n: dict[str, float]) -> list[str]:
    return [
        f"{n['network_evaluations']:,.1f}",
        _times(n),
        f"{1e3 * n['seconds_per_evaluation']:.1f}",
        f"{n['tokens_per_second']:,.0f}",
    ]


TABLES = {
    "recipes": Table(
        "First models",
        "Bits on the whole test split, with one standard error, for each seed: a character of "
        "Shakespeare (`quickstart`) and of text8, a dimension of `digits`, whose class is not "
        "given. Minutes are from the command to its end, with start-up, evaluation and samples.",
        _recipe_rows,
        ("bits", "steps", "minutes"),
        _recipe_cells,
    ),
    "families": Table(
        "All families",
        "The same network (2 layers of 128), data (text8) and number of steps (500 of 4 x 256 "
        "characters) for each family of `configs/families.py`, one number for each seed. 500 "
        "steps are a beginning: the table shows how soon a family learns. The step time is a "
        "median, with the least and the most of 5 windows.",
        _family_rows,
        ("reported bound", "bits per character", "ms a step (min-max)"),
        _family_cells,
    ),
    "speed": Table(
        "Speed",
        "A training step, an evaluation and a batch of samples. Operands of linear layers are "
        "float32 or, where the processor multiplies them, bfloat16 (`network.products`); all else"
        " is float32. Size (a) is 27 symbols, 16 x 256 tokens and 4 layers of 256; (b) 27 "
        "symbols, 4 x 256 tokens and 12 layers of 768; (c) 50257 symbols, 2 x 1024 tokens and 4 "
        "layers of 256. Samples are 16 x 256 tokens in 64 steps (a), 4 x 256 in 16 (b) and 1 x "
        "1024 in 32 (c). The share is that of the rate of a 2048 x 2048 x 2048 product of the "
        "same operands, which is timed between the windows. It counts the work of the formula: "
        "the vocabulary head at every position, and whole network evaluations in a sampler. The "
        "program computes only the part of it that is needed, so a share can be above 100%.",
        _speed_rows,
        ("seconds (min-max)", "tokens/s", "rate, GFLOP/s", "share", "temporaries MiB",
         "peak RSS GiB"),
        _speed_cells,
    ),
    "entropy": Table(
        "A source of known entropy",
        "Each family learns a Markov chain over four letters, and its bound is compared with the "
        "chain's own -log p of the same test text (800 steps of 64 x 12 letters, 2 layers of 32). "
        "A correct bound stays above, apart from the error. The error is that of the bound "
        "alone; much of it is the spread of the text, which both numbers share.",
        _entropy_rows,
        ("reported bound", "entropy, nats per letter", "bound less entropy"),
        _entropy_cells,
    ),
    "sampling": Table(
        "Cost of sampling",
        "Ancestral sampling of 256 tokens with size (a)'s network without time, on the uniform "
        "grid. A step at which a sequence changes nothing costs it no network evaluation.",
        _sampling_rows,
        ("evaluations a sequence", "seconds a batch (min-max)", "ms an evaluation", "tokens/s"),
        _sampling_cells,
    ),
}  # fmt: skip
