"""Evaluators: what a model is measured by while it trains, at the end, and later.

A new one is a file here and a line below. It is a frozen dataclass of its options with

    every       steps between its runs while training; 0: none
    final       whether it runs when training ends, and in --mode eval without --evals
    needs_data  class attribute: whether it reads data. Then it has `split` and `data`, too, with
                which `context.corpus(self.data)` gives the text
    run(experiment, params, context) -> {name: number}, JSON; `context.py` has what it is told

and, if its options may not fit the experiment, check(experiment), which raises UserError with a
message that begins with the key. The config has it as evals.NAME under any NAME.
"""

from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.ngrams import NGramModels
from md4_jax.evals.samples import DrawnSamples

EVALUATORS = {
    "likelihood": LikelihoodBound,
    "ngrams": NGramModels,
    "samples": DrawnSamples,
}
