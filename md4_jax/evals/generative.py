"""Generative perplexity of samples under a causal judge, and the samples' entropy."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.data.domains import TextDomain
from md4_jax.evals.context import Context, OnSplit, check_least
from md4_jax.evals.judged import cut, text_size
from md4_jax.evals.judges import MARK, check_source, mauve, opened
from md4_jax.evals.metrics import Likelihood
from md4_jax.evals.samples import check_guided, decoded, drawn_samples
from md4_jax.experiment import Experiment
from md4_jax.generate import diversity, writers
from md4_jax.protocols import Batch, Params, UserError
from md4_jax.protocols.phrases import TOO_FEW, amount, plus_minus
from md4_jax.samplers.draw import WIDTH

RULES = ("first", "all")


@dataclasses.dataclass(frozen=True)
class GenerativePerplexity(OnSplit):
    """Draws samples and evaluates their text under a causal judge: docs/quality.md.

    every, final, split, data  as in `likelihood`; the split is only used for MAUVE
    judge        directory of a causal run; folder, or hf:NAME on the hub, of a causal model that
                 `md4_jax.load` reads; or transformers:NAME, computed by that library
    num          number of samples; 0: sample.num
    length       largest number of the judge's tokens in a text; 0: as many as it can read
    end_of_text  first: a text ends with its first end-of-text token; all: all tokens count
    batch_size   number of texts judged at once
    mauve        whether to compute MAUVE against texts of the split, with the judge's features
    """

    judge: str = ""
    num: int = 0
    length: int = 0
    end_of_text: str = "first"
    batch_size: int = 8
    mauve: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_least(self, num=0, length=0, batch_size=1)
        if self.end_of_text not in RULES:
            raise UserError(f"end_of_text must be first or all, not {self.end_of_text!r}")

    @property
    def needs_data(self) -> bool:
        """Whether the evaluator reads data."""
        return self.mauve

    def check(self, experiment: Experiment, key: str) -> None:
        """Raises UserError without a judge, and for a model that is not a text model."""
        if not self.judge:
            raise UserError(
                f"{key}.judge must be the directory of a causal run, the folder of a causal "
                f"model, hf:NAME for one on the hub, such as hf:gpt2, or {MARK}NAME"
            )
        if not isinstance(experiment.domain, TextDomain):
            raise UserError(f"{key} is only for models of text, and this model is not one")

    def check_source(self, key: str, is_causal: Callable[[str, str], bool]) -> None:
        """Raises UserError, before a run begins, if the judge does not exist."""
        check_source(f"{key}.judge", self.judge, is_causal)

    def check_samples(self, experiment: Experiment, key: str) -> None:
        """Raises UserError, before a run begins, for guidance without a class or a prompt."""
        del key
        check_guided(experiment)

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns perplexity and bits under the judge, entropies, and the settings used."""
        key = f"evals.{context.name}.judge"
        judge = opened(key, self.judge, context.run_of, context.programs)
        asked = dataclasses.replace(
            experiment.sample, num=self.num or experiment.sample.num, trace=False
        )
        drawn = drawn_samples(experiment._replace(sample=asked), params, context.programs)
        texts = decoded(experiment, drawn)
        texts, ids = self._cut(judge, texts)
        found = judge.judge(ids, self.batch_size)
        sizes = [text_size(judge.counted(*pair)) for pair in zip(texts, ids, strict=True)]
        numbers = _numbers(found.nats, found.size, sizes)
        how = {
            "judge": self.judge,
            "judge_length": self._most(judge),
            "end_of_text": self.end_of_text,
            "first_token_counts": judge.counts_first,
            "random_numbers": WIDTH,
            "sampler": experiment.config["sample"]["name"],
        }
        entropy, error = diversity.unigram_entropy(ids)
        own = {"judge_unigram_entropy_bits": entropy, "judge_unigram_entropy_bits_se": error}
        result = {**how, **numbers, **own, **writers.of_samples(drawn)}
        if self.mauve:
            result |= self._mauve(judge, ids, context)
        context.say(f"{context.name}: {_line(result)}")
        return result

    def _cut(self, judge: Any, texts: list[str]) -> tuple[list[str], list[np.ndarray]]:
        """Returns (texts with tokens that count, these tokens); UserError if there are none."""
        length = self._most(judge)
        end = judge.end if self.end_of_text == "first" else None
        ids = cut(judge.tokens(texts), length, end)
        least = 1 if judge.counts_first else 2
        found = [(text, row) for text, row in zip(texts, ids, strict=True) if len(row) >= least]
        if not found:
            raise UserError(
                f"judge={self.judge} was given no text with at least {least} of its tokens"
            )
        return [text for text, _ in found], [row for _, row in found]

    def _most(self, judge: Any) -> int:
        """Returns the largest number of the judge's tokens in a text."""
        return min(self.length or judge.length, judge.length)

    def _mauve(self, judge: Any, ids: list[np.ndarray], context: Context) -> dict[str, Any]:
        """Returns MAUVE against as many texts of the split, cut to the same length."""
        corpus = context.corpus(self.data)
        batches = corpus.eval_batches(self.split, batch_size=1, rows=np.arange(1))
        texts = [text_of(corpus, batch) for _, batch in zip(range(len(ids)), batches, strict=False)]
        _, theirs = self._cut(judge, texts)
        sets = (judge.features(part, self.batch_size) for part in (ids, theirs))
        return {"split": self.split, "mauve": mauve(*sets), "mauve_references": len(theirs)}


def text_of(corpus: Corpus, batch: Batch) -> str:
    """Returns the text of the first sequence of a batch, with its prompt and without padding."""
    row = batch.tokens[0]
    if "segments" in batch.context:
        row = row[batch.context["segments"][0] >= 0]
    return corpus.domain.decode(row)


def _numbers(nats: np.ndarray, size: np.ndarray, text: list) -> dict[str, Any]:
    """Returns the judge's cost per token, byte and text, with standard errors over texts."""
    total = Likelihood()
    total.add(nats[None], size, text=np.array(text))
    found = total.result()
    kept = {"judge_tokens": found["tokens"], "judged": found["sequences"]}
    for name in ("perplexity", "bits_per_token", "bits_per_byte"):
        for key in (name, f"{name}_se"):
            if key in found:
                kept["generative_" + key] = found[key]
    return kept


def _line(result: Mapping[str, Any]) -> str:
    """Formats the result."""
    shares = f", MAUVE {result['mauve']:.4f}" if "mauve" in result else ""
    error = plus_minus(result["generative_perplexity_se"], ".2f")
    counts = f"{amount(result['judged'], 'text')}, {amount(result['judge_tokens'], 'token')}"
    why = "" if error else f"; {TOO_FEW}"
    return (
        f"generative perplexity {result['generative_perplexity']:.2f}{error}{shares}, unigram "
        f"entropy {result['judge_unigram_entropy_bits']:.3f} bits in the judge's tokens "
        f"({counts}, {result['judge']}{why})"
    )
