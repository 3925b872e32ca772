"""Downstream tasks of lm-evaluation-harness: docs/downstream.md.

python -m md4_jax.model.harness --model md4_jax --model_args path=RUN --tasks arc_easy,hellaswag
"""

import sys
from typing import Any

from md4_jax.data.chat import Chat
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.texts import score_texts
from md4_jax.model import continuations
from md4_jax.model.load import load
from md4_jax.options import check_whole
from md4_jax.protocols import UserError

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    INSTALL = "downstream tasks need lm_eval: pip install -e '.[lm-eval]'"
    if __name__ == "__main__":
        sys.exit(f"error: {INSTALL}")
    raise ImportError(INSTALL) from error

# Options that the harness passes to every model.
NOT_OURS = ("max_batch_size", "device")


@register_model("md4_jax")
class Harness(LM):
    """Interface of a model to lm_eval: log-likelihoods of continuations, and generation.

    path          run, folder or name on the hub, as for `md4_jax.load`
    likelihood    name of the bound; '': the one that --mode eval uses; any_order: exact numbers
                  of masks; chain_rule: the exact likelihood, left to right
    draws         number of noise draws for each continuation, if the likelihood is a bound
    batch_size    number of sequences per batch; auto is 16
    seed          seed of draws and samples
    greedy        whether `is_greedy` is computed, which tasks like lambada need
    max_gen_toks  largest number of tokens of a text, for tasks that do not set it
    others        keys of the section `sample`: sampler (its name), steps, temperature, ...
                  `guidance` also applies to log-likelihoods, with the context as the condition

    UserError for a model that is not a text model, for guidance that it does not support, and for
    options that do not exist, which a task without generation would not notice.
    """

    def __init__(
        self,
        path: str,
        likelihood: str = "",
        draws: int = 16,
        batch_size: int | str = 16,
        seed: int = 0,
        greedy: bool = True,
        **others: Any,
    ):
        super().__init__()
        self.model = load(path)
        self.model.check_text("lm_eval")
        size = int(batch_size) if str(batch_size).isdecimal() else 16
        others = {key: value for key, value in others.items() if key not in NOT_OURS}
        self._greedy, self._most = greedy, others.pop("max_gen_toks", 64)
        check_whole("max_gen_toks", self._most)
        if greedy and self.model.experiment.objective.needs.ordered:
            raise UserError(
                "greedy=True needs a network that was trained on whole texts, but this one was "
                "trained on tokens in a random order: set greedy=False"
            )
        self._guidance = continuations.guidance_of(self.model, others.get("guidance", 1.0))
        if "sampler" in others:
            others["name"] = others.pop("sampler")
        self._sampling = {"seed": seed, "batch_size": size, **others}
        continuations.check_options(self.model, self._sampling)
        objective = continuations.objective_of(self.model, likelihood)
        self.bound = LikelihoodBound(objective, draws=draws, batch_size=size, seed=seed)

    @property
    def tokenizer_name(self) -> str:
        """Returns the name under which requests are cached, as part of a file's name."""
        return self.model.origin.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns the template that the harness records; "": none is used."""
        if isinstance(chat_template, str):
            raise UserError(
                f"--apply_chat_template {chat_template}: give no name, because the model has only "
                "one template"
            )
        return self._form().template if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a conversation, up to where the answer begins or continues."""
        form = self._form()
        return form.render(chat_history) if add_generation_prompt else form.prompt(chat_history)

    def _form(self) -> Chat:
        if self.model.form is None:
            raise UserError(
                f"{self.model.origin} has no chat template: remove --apply_chat_template"
            )
        return self.model.form

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns (log p(continuation | context), whether greedy decoding gives it) of each."""
        pairs = [continuations.pair(self.model, *request.args) for request in requests]
        logs, _ = continuations.log_likelihoods(self.model, pairs, self.bound, self._guidance)
        greedy = [False] * len(pairs)
        if self._greedy:
            size = self.bound.batch_size
            greedy = continuations.are_greedy(self.model, pairs, size, self._guidance)
        return [(float(log), bool(one)) for log, one in zip(logs, greedy, strict=True)]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Returns log p of whole texts, in windows as in the evaluation of a split."""
        own, texts = self.model, [request.args[0] for request in requests]
        scores = score_texts(own.experiment, own.params, texts, self.bound, own.programs)
        return [-float(nats) for nats in scores.nats]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Returns the text after each context, up to the first of its `until`."""
        sizes = [int(request.args[1].get("max_gen_toks", self._most)) for request in requests]
        found = [""] * len(requests)
        for size in sorted(set(sizes)):
            chosen = [i for i, own in enumerate(sizes) if own == size]
            contexts = [requests[i].args[0] for i in chosen]
            texts = continuations.continued(self.model, contexts, size, self._sampling)
            for i, text in zip(chosen, texts, strict=True):
                found[i] = continuations.before(text, requests[i].args[1].get("until") or [])
        return found


def main() -> None:
    """Runs lm_eval with the model md4_jax registered."""
    try:
        cli_evaluate()
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
