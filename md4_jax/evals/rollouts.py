"""Rollouts of a policy: texts drawn by the model in training, with rewards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.data.loader import Repeated, TrainIterator
from md4_jax.experiment import Experiment, clean_prompts, rows_of
from md4_jax.protocols import Array, Batch, Params, Prompt, updates_of
from md4_jax.runtime.sharding import local_rows, to_global, to_host
from md4_jax.samplers.batches import make_sampler
from md4_jax.samplers.steering import Steering

# Added to the standard deviation of the rewards of a group, which may be 0.
SMALLEST = 1e-4
NOTHING = -1  # value of positions after the end of a text
# Distinguishes keys of samples from those of noise. It is no step, which `draws` folds in there.
SAMPLES = 2**31 + 7


class Rollouts:
    """Draws texts for training steps by the settings of the `sample` section, with their rewards.

    Each batch of texts is used for `updates_of`(objective) successive steps.
    """

    def __init__(self, experiment: Experiment, rewarded: Steering):
        self._experiment, self._rewarded = experiment, rewarded
        self._batch: Batch | None = None
        self._sampler = make_sampler(
            experiment.network,
            experiment.loop,
            experiment.grid,
            experiment.mesh,
            guidance=experiment.sample.guidance,
            clean_prompts=clean_prompts(experiment.config["data"]),
        )

    def __call__(self, state: Any, step: int, prompts: Batch) -> Batch:
        """Returns this process's rows of the batch of a step: `group` texts for each prompt.

        state    `TrainState` before the step
        prompts  sequences of the data; the tokens that do not count are the prompt. All steps that
                 use one batch get the same prompts

        A run that resumes between two steps with one batch redraws it, with the same model.
        """
        first = step - step % updates_of(self._experiment.objective)
        if step == first or self._batch is None:
            params = state.whole if first == step else state.behaving
            self._batch = self._made(params, first, prompts)
        return self._batch

    def _made(self, params: Params, step: int, prompts: Batch) -> Batch:
        """Draws the batch for a step and the following ones that reuse it, with its rewards."""
        experiment, group = self._experiment, self._experiment.objective.group
        context = {name: np.repeat(x, group, axis=0) for name, x in prompts.context.items()}
        data, counts = (np.repeat(np.asarray(x), group, axis=0) for x in prompts[:2])
        given = to_global((Prompt(data, ~counts), context), experiment.mesh)
        tokens = self._drawn(params, step, given)
        # Each process computes the whole batch, since a judge uses the devices of all processes.
        whole = to_host(given[0])
        rewards = self._rewards(tokens, whole.tokens, ~whole.mask)
        better = advantages(rewards, group, experiment.objective.normalised)
        own = local_rows(experiment.mesh, len(tokens))
        return Batch(
            tokens[own],
            counts,
            context,
            reward=rewards[own].astype(np.float32),
            advantage=better[own],
        )

    def _drawn(self, params: Params, step: int, given: tuple[Prompt, dict]) -> np.ndarray:
        """Returns the texts [B, L] of the whole batch, for `given` (prompts, context)."""
        mesh, size = self._experiment.mesh, self._experiment.train.batch_size
        keys = sample_keys(self._experiment.train.seed, step, size)
        with jax.set_mesh(mesh):
            found = self._sampler.program(params, self._experiment.sampler_step, keys, *given)
        tokens = np.asarray(to_host(found[0].z))
        # Blocks after the end of a text are not drawn; they hold masks.
        left = np.asarray(params["process"].is_noise(tokens))
        return np.where(left, self._experiment.ends[0], tokens) if left.any() else tokens

    def _rewards(self, tokens: np.ndarray, data: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns the rewards float64 [B] of texts, or of answers compared with those of the data.

        A text ends at its first end token.
        """
        compared = getattr(self._rewarded.reward, "compared", None)
        if compared is None:
            rewarded = self._rewarded._replace(domain=Cut(self._rewarded.domain))
            return rewarded.rewards(ended(tokens, counts, self._experiment.ends))
        answers, expected = (self._answers(x, counts) for x in (tokens, data))
        return self._rewarded.checked(compared(answers, expected), len(tokens))

    def _answers(self, tokens: np.ndarray, counts: np.ndarray) -> list[str]:
        """Returns the text of each answer, up to its end token."""
        domain, texts = self._experiment.domain, []
        stops = {*self._experiment.ends, getattr(domain, "eot_id", None)}
        for row, own in zip(tokens, counts, strict=True):
            answer = [int(token) for token in row[own]]
            place = next((n for n, token in enumerate(answer) if token in stops), len(answer))
            texts.append(domain.decode(np.asarray(answer[:place], np.int32)))
        return texts


def sample_keys(seed: int, step: int, count: int) -> Array:
    """Returns the key of each text of a step, determined by seed, step and row."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), SAMPLES), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


class Cut:
    """Domain of texts that may be shorter than their row, with NOTHING after their end."""

    def __init__(self, domain: Any):
        self._domain = domain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._domain, name)

    def decode(self, row: np.ndarray) -> Any:
        """Returns the text of a row up to its end."""
        row = np.asarray(row)
        return self._domain.decode(row[row != NOTHING])


def ended(tokens: np.ndarray, counts: np.ndarray, ends: tuple[int, ...]) -> np.ndarray:
    """Replaces the tokens after the first end token of an answer by NOTHING."""
    stops = np.isin(tokens, ends) & counts
    first = np.where(stops.any(axis=1), stops.argmax(axis=1), tokens.shape[1])[:, None]
    return np.where(np.arange(tokens.shape[1]) > first, NOTHING, tokens)


def advantages(rewards: np.ndarray, group: int, normalised: bool) -> np.ndarray:
    """Computes the advantage of each text within its group: float32 [B].

    r_i - mean(r), divided by the standard deviation of the group's rewards if `normalised`.
    """
    groups = rewards.reshape(-1, group)
    found = groups - groups.mean(axis=1, keepdims=True)
    # The mean of equal rewards may differ from them by rounding.
    found[groups.min(axis=1) == groups.max(axis=1)] = 0.0
    if normalised:
        found = found / (groups.std(axis=1, keepdims=True) + SMALLEST)
    return found.reshape(-1).astype(np.float32)


def maker(experiment: Experiment, rewarded: Steering | None) -> Callable[[Any, int, Batch], Batch]:
    """Makes (`TrainState`, step, batch of the data) -> training batch; usually the identity."""
    if experiment.objective.needs.rewards:
        return Rollouts(experiment, rewarded)
    return lambda state, step, batch: batch


def data_of(experiment: Experiment, corpus: Corpus, step: int) -> TrainIterator | Repeated:
    """Returns the batches of the data from a step on, each repeated as the objective requires."""
    rows = rows_of(experiment, prompts_of(experiment))
    batches = corpus.train_batches(seed=experiment.train.seed, **rows)
    times = updates_of(experiment.objective)
    return Repeated(batches, times, step % times) if times > 1 else batches


def prompts_of(experiment: Experiment) -> int:
    """Returns the number of data sequences per step: the batch size, or the number of groups."""
    size = experiment.train.batch_size
    return size // experiment.objective.group if experiment.objective.needs.rewards else size
