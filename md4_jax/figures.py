"""Pictures of a run, from the rows of its metrics.jsonl."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

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
