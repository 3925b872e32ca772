"""Evaluators: measurements of a model during training, at its end, and later.

A new evaluator is a file here and a line below. It is a frozen dataclass of its options with

    every       training steps between its runs; 0: none
    final       whether it runs when training ends, and in --mode eval without --evals
    needs_data  class attribute: whether it reads data. If so, it also has the options `split` and
                `data`, and `context.corpus(self.data)` is the corpus
    run(experiment, params, context) -> {name: number}, JSON; see context.py

and optionally

    check(experiment, key)      raises UserError for options that do not fit the experiment
    check_samples(experiment, key)  raises UserError, before the run, if guidance does not suit the
                                samples that it draws
    check_size(key, size)       raises UserError for too few sequences of its split, before the run
    opened(key, corpus_of)      reads data of its own, also before training begins
    length_of(experiment)       (key, tokens) of the sequences that the network reads; the key is
                                '' if data.length of the run is that number

The argument `key` is evals.NAME, the section in the config. --evals KIND runs a kind without a
section, with its default options.
"""

from md4_jax.evals.classification import Classification
from md4_jax.evals.frechet import FrechetDistance
from md4_jax.evals.generative import GenerativePerplexity
from md4_jax.evals.information_profile import InformationProfile
from md4_jax.evals.known_words import KnownWords
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.ngrams import NGramModels
from md4_jax.evals.path import PathLikelihood
from md4_jax.evals.samples import DrawnSamples
from md4_jax.evals.zero_shot import ZeroShot

EVALUATORS = {
    "classification": Classification,
    "frechet": FrechetDistance,
    "generative_perplexity": GenerativePerplexity,
    "information_profile": InformationProfile,
    "known_words": KnownWords,
    "likelihood": LikelihoodBound,
    "ngrams": NGramModels,
    "path": PathLikelihood,
    "samples": DrawnSamples,
    "zero_shot": ZeroShot,
}
