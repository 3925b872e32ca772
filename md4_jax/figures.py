"""Pictures of a run, from the rows of its metrics.jsonl."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def loss_curve(rows: Sequence[dict], path: Path, ladder: Sequence[float] = ()) -> None:
    """Training loss and held-out bound against the step, as PNG; n-gram levels as lines."""
    figure, axes = plt.subplots(figsize=(8, 5), dpi=120)
    for name, label, style in (
        ("train_bits_per_token", "training bound", dict(color="tab:blue", linewidth=1)),
        ("train_loss_bits", "training loss (not a bound)", dict(color="tab:gray", linewidth=1)),
    ):
        points = [(r["step"], r[name]) for r in rows if isinstance(r.get(name), float)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    points = [
        (r["step"], r["eval_bits_per_token"], r["eval_bits_per_token_se"])
        for r in rows
        if "eval_bits_per_token" in r
    ]
    if points:
        steps, values, errors = zip(*points, strict=True)
        axes.errorbar(
            steps, values, errors, fmt="o-", color="tab:orange", label="held-out bound, EMA"
        )
    for order, level in enumerate(ladder, start=1):
        axes.axhline(level, color="tab:green", linewidth=0.7, linestyle="--")
        axes.text(1.0, level, f" {order}-gram", transform=axes.get_yaxis_transform(), va="center")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per token")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def reveal_times(z: np.ndarray, grid: np.ndarray, mask: int) -> np.ndarray:
    """The time at which each position of a path [T + 2, L] stops being a mask, [L]."""
    first = np.argmax(z != mask, axis=0)
    return grid[np.maximum(len(grid) - 1 - first, 0)]


def powers(
    symbols: Sequence[str], power: np.ndarray, tokens: np.ndarray, times: np.ndarray, path: Path
) -> None:
    """Learned w by symbol, and when the symbols of one sample were revealed beside w / (w + 1)."""
    order = np.argsort(-power, kind="stable")
    if len(order) > 60:  # the most and the least eager
        order = np.concatenate([order[:30], order[-30:]])
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(10, 7), dpi=120, sharex=True)
    here = np.arange(len(order))
    upper.bar(here, power[order], color="tab:blue")
    upper.set_ylabel("w")
    lower.plot(here, power[order] / (power[order] + 1), "k_", label="mean by the process, w/(w+1)")
    place = {symbol: i for i, symbol in enumerate(order)}
    shown = [(place[k], t) for k, t in zip(tokens, times, strict=True) if k in place]
    if shown:
        lower.plot(*zip(*shown, strict=True), "o", color="tab:orange", alpha=0.4, label="sample 0")
    lower.set_ylabel("time of the reveal (1 is first)")
    lower.set_xticks(here, [repr(symbols[i])[1:-1] for i in order], rotation=90, fontsize=8)
    lower.legend(loc="lower left")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def frontier(rows: Sequence[dict], path: Path) -> None:
    """Bits under the judge and unigram entropy of samples against network evaluations.

    A row is the JSON line of --mode sample with its steps and temperature; a line joins the rows of
    one temperature.
    """
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), dpi=120)
    for temperature in sorted({row["temperature"] for row in rows}):
        line = [row for row in rows if row["temperature"] == temperature]
        line.sort(key=lambda row: row["network_evaluations"])
        used = [row["network_evaluations"] for row in line]
        for axes, name in zip(panels, ("judge_bits_per_token", "unigram_entropy_bits"), strict=True):
            values = [row[name] for row in line]
            errors = [row.get(f"{name}_se") or 0.0 for row in line]
            axes.errorbar(used, values, errors, fmt="o-", label=f"temperature {temperature:g}")
    for axes, label in zip(
        panels, ("bound on -log p under the judge, bits/token", "unigram entropy, bits"), strict=True
    ):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("network evaluations a sequence")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
