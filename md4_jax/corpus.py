"""The text of an experiment: its tokenizer, its splits, and their batches for this process."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from md4_jax.data import loader, packing, text_size
from md4_jax.data.loader import TrainIterator, train_iterator
from md4_jax.data.tokenizers import from_json
from md4_jax.experiment import Experiment, eval_batch_size
from md4_jax.protocols import Batch, UserError
from md4_jax.runtime.paths import Place, replace
from md4_jax.runtime.sharding import local_rows, max_over_processes

TOKENIZER_FILE = "tokenizer.json"


def stored_tokenizer(workdir: Place) -> Any:
    """The tokenizer that a run keeps, so that sampling needs no data; UserError if it is gone."""
    kept = workdir / TOKENIZER_FILE
    if not kept.exists():
        raise UserError(f"{kept} is missing: train in this --workdir first")
    return read_tokenizer(kept)


def keep_tokenizer(tokenizer: Any, workdir: Place) -> None:
    """Writes the tokenizer of a run once, whole or not at all; what is there stays as it is."""
    kept = workdir / TOKENIZER_FILE
    if not kept.exists():
        replace(kept, tokenizer.to_json())


def read_tokenizer(kept: Place) -> Any:
    """The tokenizer in a file; UserError that names the file if it is cut short or changed."""
    try:
        return from_json(kept.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(
            f"{kept} is damaged, or is not the tokenizer of a run ({_first_line(error)}). Put a "
            "copy of it back. If there is none, move it away and start the command that trained "
            "the run again: with the same data the same tokenizer is made"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def stream(source: Any, tokenizer: Any, split: str) -> np.ndarray:
    """The tokens of a split, memory-mapped."""
    return packing.token_stream(source, tokenizer, split)


def fingerprint(experiment: Experiment, source: Any) -> dict[str, int]:
    """{tokens, crc32} of the training split; UserError if another process has another text."""
    found = packing.fingerprint(source, experiment.tokenizer, "train")
    number = found["crc32"] >> 1  # of 31 bits
    if max_over_processes(number) != -max_over_processes(-number):
        raise UserError("the processes have different training texts: make data.path the same")
    return found


def check_same_text(kept: Mapping[str, int] | None, now: Mapping[str, int], workdir: Place) -> None:
    """UserError if a run is resumed on other tokens than it was trained on.

    kept: the fingerprint in its checkpoint; None in those that have none.
    """
    if kept is not None and kept != now:
        before, after = (f"{x['tokens']:,} tokens, CRC-32 {x['crc32']:08x}" for x in (kept, now))
        raise UserError(
            f"{workdir} was trained on another text: the tokens of its training split were "
            f"{before}; now they are {after}. Put the text (data.path) and {TOKENIZER_FILE} back "
            "as they were to resume. To train on the new text take another --workdir, with "
            f"--config.train.initial={workdir} to begin with the parameters of this run"
        )


def data_sizes(experiment: Experiment, source: Any) -> dict[str, loader.SplitSize]:
    """Tokenises every split that the run will need; UserError now for one that is too short."""
    splits = ["train", *(["validation"] if experiment.eval.every else []), experiment.eval.split]
    sizes = {
        split: loader.split_size(
            stream(source, experiment.tokenizer, split), experiment.data.length
        )
        for split in dict.fromkeys(splits)
    }
    for split, size in sizes.items():
        if size.tokens == 0 or (split == "train" and size.sequences == 0):
            raise UserError(
                f"the {split} split has {size.tokens} tokens, fewer than "
                f"{'one sequence of' if split == 'train' else 'needed with'} "
                f"data.length={experiment.data.length}: take a larger corpus or lower data.length"
            )
    return sizes


def train_batches(experiment: Experiment, source: Any) -> TrainIterator:
    """This process's rows of the endless shuffled training batches."""
    return train_iterator(
        stream(source, experiment.tokenizer, "train"),
        experiment.data.length,
        batch_size=experiment.train.batch_size,
        rows=local_rows(experiment.mesh, experiment.train.batch_size),
        seed=experiment.train.seed,
        segments_eot=_segments_eot(experiment),
    )


def eval_batches(experiment: Experiment, source: Any, split: str) -> Iterator[Batch]:
    """This process's rows of a whole split, in order."""
    return loader.eval_batches(
        stream(source, experiment.tokenizer, split),
        experiment.data.length,
        batch_size=eval_batch_size(experiment),
        stride=experiment.eval.stride,
        rows=local_rows(experiment.mesh, eval_batch_size(experiment)),
        segments_eot=_segments_eot(experiment),
        text_size=text_size.of_one_text(experiment.tokenizer),
    )


def batches_of(experiment: Experiment, tokens: np.ndarray) -> Iterator[Batch]:
    """This process's rows of sequences [N, L], in order, each a text of its own."""
    return loader.eval_batches(
        tokens.ravel(),
        tokens.shape[1],
        batch_size=eval_batch_size(experiment),
        rows=local_rows(experiment.mesh, eval_batch_size(experiment)),
        segments_eot=_segments_eot(experiment),
        text_size=text_size.of_many_texts(experiment.tokenizer),
    )


def _segments_eot(experiment: Experiment) -> int | None:
    return experiment.tokenizer.eot_id if experiment.data.separate_documents else None
