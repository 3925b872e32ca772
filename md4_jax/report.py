"""The words and pictures around a run: what is about to be trained, results, where things are."""

import json
import math
from typing import Any

import jax
import numpy as np

import md4_jax
from md4_jax import diversity, figures, sharding, traces
from md4_jax.config import commit
from md4_jax.metrics import read_rows
from md4_jax.paths import Place, append
from md4_jax.protocols import PARTS, Params

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"


def start(built: Any, state: Any, workdir: Place, step: int) -> str:
    """Parameter count, mesh, batch and directory, before the first step."""
    params, leaves = state.params, jax.tree.leaves(state)
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves) / 2**20
    network = sum(math.prod(x.shape) for x in jax.tree.leaves(params["network"]))
    learned = sum(math.prod(x.shape) for x in jax.tree.leaves(params["process"]))
    devices = built.mesh.devices
    axes = ", ".join(f"{axis}={size}" for axis, size in built.mesh.shape.items())
    train = built.train
    lines = [
        f"md4_jax {md4_jax.__version__} ({commit()[:12]}), jax {jax.__version__}",
        f"parameters  {network:,} in the network, {learned} in the process",
        f"mesh        {axes} ({devices.size} of {jax.device_count()} "
        f"{devices.flat[0].platform} devices, {jax.process_count()} processes)",
        f"batch       {train.batch_size} x {built.data.length} tokens, "
        f"{train.microbatches} microbatches, {train.num_steps} steps",
        f"memory      {held:,.1f} MiB on a device: parameters, optimizer and moving average",
        f"workdir     {workdir}",
    ]
    if devices.size > 1:
        lines += ["parameters on a device:", sharding.table(params, built.mesh)]
    if step:
        lines.append(f"resuming from step {step}")
    return "\n".join(lines)


def line(result: dict[str, Any]) -> str:
    """'<= 2.345 +- 0.012 bits/token, ...' for a person; no sign before what is exact."""
    unit = "character" if "bits_per_character" in result else "token"
    parts = {part: result.get(f"{part}_bits_per_token") for part in PARTS}
    sign = "" if result["exact"] else "<= "
    other = ", ".join(f"{part} {bits:.4f}" for part, bits in parts.items() if bits)

    def said(name: str, form: str) -> str:
        return f"{sign}{result[name]:{form}} +- {result[name + '_se']:{form}}"

    words = [f"{said(f'bits_per_{unit}', '.4f')} bits/{unit}{f' (of it {other})' if other else ''}"]
    if "bits_per_byte" in result and result["bytes"] != result["tokens"]:
        words.append(f"{said('bits_per_byte', '.4f')} bits/byte")
    words.append(f"perplexity {said('perplexity', '.2f')}")
    if "word_perplexity" in result and unit == "token":
        words.append(f"word perplexity {said('word_perplexity', '.5g')}")
    counts = f"({result['sequences']} sequences, {result['draws']} draws each)"
    return f"{', '.join(words)} {counts}"


def learned(process: Any, tokenizer: Any, most: int = 10) -> str:
    """What the process learned of each symbol: the range, and the symbols at both ends."""
    lines = []
    for name, values in process.learned().items():
        values = np.asarray(values)
        order = np.argsort(-values, kind="stable")
        lines.append(
            f"{name} by symbol: min {values.min():.4f}, mean {values.mean():.4f}, "
            f"max {values.max():.4f}"
        )
        for word, ids in (("largest", order[:most]), ("smallest", order[::-1][:most])):
            each = ", ".join(f"{tokenizer.decode([i])!r} {values[i]:.3f}" for i in ids)
            lines.append(f"  {word}: {each}")
    return "\n".join(lines)


def ladder(levels: list[float], result: dict[str, Any]) -> str:
    """n-gram models of the same text beside the model, best last, to judge it by."""
    rows = [(level, f"{order}-gram model") for order, level in enumerate(levels, start=1)]
    kind = "exact" if result["exact"] else f"bound, +- {result['bits_per_token_se']:.4f}"
    rows.append((result["bits_per_token"], f"this model ({kind})"))
    body = "\n".join(f"  {level:7.4f}  {name}" for level, name in sorted(rows, reverse=True))
    return f"bits per token on the same text:\n{body}"


def picture(workdir: Place, levels: list[float]) -> str:
    """Draws figures/loss.png anew from metrics.jsonl; its path, or why there is none."""
    path, log = workdir / "figures" / "loss.png", workdir / METRICS
    if not log.exists():
        return "none: nothing was logged, since there were fewer steps than log.every"
    figures.loss_curve(read_rows(log), path, levels)
    return str(path)


def of_samples(drawn: Any) -> dict[str, Any]:
    """Cost and variety of samples, by name, for a line of JSON."""
    used = drawn.evaluations
    return {
        "samples": len(drawn.tokens),
        "length": float(drawn.lengths.mean()),
        "length_min": int(drawn.lengths.min()),
        "length_max": int(drawn.lengths.max()),
        "network_evaluations": float(used.mean()),
        "network_evaluations_min": int(used.min()),
        "network_evaluations_max": int(used.max()),
        "seconds_per_sequence": drawn.seconds / len(drawn.tokens),
        **diversity.numbers(
            [row[:end] for row, end in zip(drawn.tokens, drawn.lengths, strict=True)]
        ),
    }


def trace(samples: Place, drawn: Any, built: Any, params: Params) -> list[Place]:
    """Pictures beside the file of the samples: how the first came about, and GenMD4's powers."""
    path = traces.trajectory(drawn.frames, drawn.given[0], built.tokenizer)
    gif, page = samples.with_suffix(".gif"), samples.with_suffix(".html")
    traces.gif(path, gif)
    name = built.config["sample"]["name"]
    traces.html(
        path, page, f"Sample 0 of {samples.stem}: {name}, {built.config['objective']['name']}"
    )
    made = [gif, page]
    for learned, values in params["process"].learned().items():
        symbols = [traces.word(built.tokenizer, i) for i in range(built.tokenizer.vocab_size)]
        times = figures.reveal_times(drawn.frames[0], built.grid, built.process.mask_id)
        free = ~drawn.given[0]
        made.append(samples.with_suffix(f".{learned}.png"))
        figures.powers(symbols, np.asarray(values), drawn.tokens[0][free], times[free], made[-1])
    return made


def keep(workdir: Place, result: dict[str, Any]) -> None:
    """Adds the result of a finished training to evaluations.jsonl, with its commit."""
    append(workdir / EVALUATIONS, as_json({**result, "commit": commit()}) + "\n")


def as_json(numbers: dict[str, Any]) -> str:
    """One line of JSON; what is not finite becomes null."""
    plain = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()
    }
    return json.dumps(plain)
