"""A trained model with its domain: sampling, likelihoods, logits, saving and exporting."""

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from md4_jax.config import build, schema
from md4_jax.config import load as config_lib
from md4_jax.data.chat import Chat, Messages
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.samples import check_draws, decoded, drawn_samples, prompts_of, watched
from md4_jax.evals.texts import Scores, bucket, score_texts
from md4_jax.evals.token_costs import TokenCosts, splitting, token_costs
from md4_jax.experiment import Experiment
from md4_jax.generate.traces import Trajectory, trajectory
from md4_jax.model import answers, bounds, folder, hub, inputs, outputs, peft_writing, pickling
from md4_jax.model.adapters import merged as without_adapters
from md4_jax.model.layout import Layout
from md4_jax.protocols import Params, Prompt, UserError
from md4_jax.runtime.paths import Place, place
from md4_jax.samplers import SAMPLERS
from md4_jax.samplers.live import SampleState
from md4_jax.samplers.particles import Steered


class Generated(NamedTuple):
    """N samples.

    texts        text of each sample up to its end, or a uint8 array for images
    tokens       int32 [N, L]
    lengths      int64 [N], number of tokens of each text
    evaluations  int64 [N], number of network evaluations of each sample
    trace        states of the first sample after each step, with trace=True; functions of
                 generate/traces.py show them
    steered      rewards and weights, if samples were steered by a reward
    """

    texts: list
    tokens: np.ndarray
    lengths: np.ndarray
    evaluations: np.ndarray
    trace: Trajectory | None
    steered: Steered | None = None


@dataclasses.dataclass(eq=False)  # each is equal to itself alone, and may be a key of a dict
class Model(pickling.Unpickled):
    """Trained model, made by `md4_jax.load`.

    experiment  objects made from the config: network, process, domain, mesh and others
    params      moving average of the parameters, {'network', 'process'}, on the mesh's devices
    step        number of training steps
    origin      folder from which the model was read
    facts       commit that trained the model, and results of its evaluations
    form        chat template, if the model has one
    layout      file layout of the published checkpoint from which the model was made
    programs    cache of compiled functions
    """

    experiment: Experiment
    params: Params
    step: int
    origin: str
    facts: dict[str, Any]
    form: Chat | None = None
    layout: Layout | None = None

    def __post_init__(self):
        self.programs: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"<Model of {self.origin}: {self.size:,} parameters, step {self.step}>"

    @property
    def config(self) -> dict[str, Any]:
        """Config as nested dicts."""
        return self.experiment.config

    @property
    def domain(self) -> Any:
        """Meaning of the tokens: `encode`, `decode`, `vocab_size`."""
        return self.experiment.domain

    @property
    def length(self) -> int:
        """Number of tokens of a training sequence."""
        return self.experiment.data.length

    @property
    def size(self) -> int:
        """Number of parameters of the network."""
        return self.experiment.network.size(self.params["network"])

    @property
    def has_token_costs(self) -> bool:
        """Whether `token_costs` works, because the bound is a sum over tokens."""
        try:
            splitting(self.experiment, self.bound(""))
        except UserError:
            return False
        return True

    def samplers(self) -> list[str]:
        """Returns the names of the samplers that support the process and the network."""
        found = []
        for name in SAMPLERS:
            with contextlib.suppress(UserError):
                self.sampling({"name": name})
                found.append(name)
        return found

    def sample(
        self, num: int = 4, prompt: str = "", *, sampler: str = "", **options: Any
    ) -> Generated:
        """Draws samples as --mode sample does.

        num      number of samples of each prompt
        prompt   text with which all samples begin
        sampler  sample.name; "": that of the config
        options  other keys of the section `sample`: steps, seed, temperature, template, trace, ...
                 `reward` is a dict of the keys of the section `sample.reward`, with its name;
                 `classifier` is a run that guides the samples to the class `label`

        Raises UserError for an unknown key and for options that the model does not support.
        """
        asked = {"num": num, "prompt": prompt, **options}
        experiment = self.sampling(asked | ({"name": sampler} if sampler else {}))
        drawn = drawn_samples(experiment, self.params, self.programs)
        trace = None
        if drawn.paths is not None:
            frames, number = drawn.path(0)
            trace = trajectory(frames, drawn.prompt_mask[0], self.domain, number)
        found = (drawn.tokens, drawn.lengths, drawn.evaluations, trace, drawn.steered)
        return Generated(decoded(experiment, drawn), *found)

    def infill(
        self, text: str, num: int = 1, *, blank: str = "_", sampler: str = "", **options: Any
    ) -> Generated:
        """Fills each `blank` of a text with one token; other arguments are those of `sample`.

        The samples end where the text ends; tokens that the model draws after it are dropped. A
        network with end tokens, such as that of proteins, has its end token there.

        A model such as DreamOn, whose sampler is `resize`, may fill each run of blanks with more
        or fewer tokens; `grow` is the largest number of tokens that the whole text may gain.
        """
        self.check_text("infill", text)
        if not blank or blank not in text:
            raise UserError(f"the text must contain a blank {blank!r} to fill: {text!r}")
        pieces = text.split(blank)
        length = len(pieces) - 1 + sum(len(self.domain.encode(piece)) for piece in pieces if piece)
        options = inputs.full(options)
        asked = options | ({"name": sampler} if sampler else {})
        step = self.sampling(asked, prompted=True).sampler_step
        if step.needs.hides:  # on a canvas of one of few lengths
            options = {"length": bucket(length + step.grow, self.length), **options}
        elif self.experiment.network.marked:
            options.setdefault("length", length)
        found = self.sample(num, template=text, blank=blank, sampler=sampler, **options)
        if step.needs.hides:
            return found
        tokens = found.tokens[:, :length]
        texts = [self.domain.decode(row) for row in tokens]
        return found._replace(texts=texts, tokens=tokens, lengths=np.full(len(tokens), length))

    def chat(
        self, messages: str | Messages, new_tokens: int = 128, *, sampler: str = "", **options: Any
    ) -> str:
        """Generates the answer to a conversation; returns its text up to the end of the turn.

        messages    [{"role": "user", "content": TEXT}, ...], or the text of one message. If the
                    last message is the assistant's, the model continues it
        new_tokens  largest number of tokens of the answer, and the default of sample.steps
        options     as in `sample`

        Raises UserError for a model without a chat template and for too long a conversation.
        """
        self.check_text("chat")
        asked = {"steps": new_tokens, **options} | ({"name": sampler} if sampler else {})
        return answers.answer(self, messages, new_tokens, asked)

    def score(
        self,
        texts: str | Sequence[str],
        *,
        draws: int = 16,
        objective: str = "",
        stride: int = 0,
        batch_size: int = 16,
        seed: int = 0,
        label: int = -1,
    ) -> Scores:
        """Estimates -log p of each text, or a bound on it, with its standard error.

        draws       number of noise draws for each text
        objective   name of the bound; "": the one that --mode eval uses
        stride      number of new tokens in each window of a long text; 0: all
        batch_size  number of sequences that are computed at once
        label       class of the texts; -1: no class, for a network with network.label_dropout
        """
        self.check_text("score")
        bound = LikelihoodBound(
            self.bound(objective), draws=draws, stride=stride, batch_size=batch_size, seed=seed
        )
        asked = inputs.texts_of(texts)
        return score_texts(self.experiment, self.params, asked, bound, self.programs, label)

    def token_costs(
        self, text: str, *, estimates: int = 4, objective: str = "", label: int = -1
    ) -> TokenCosts:
        """Estimates the contribution of each token of a text to its bound, in bits.

        estimates  number of independent estimates, each from 16 draws; 1 gives no standard error
        objective  name of the bound, as in `score`; it must be a sum over tokens
        """
        self.check_text("token_costs", text)
        bound, own = self.bound(objective), self.experiment
        settings = {"estimates": estimates, "label": label}
        return token_costs(own, self.params, text, bound, self.programs, **settings)

    def watch(
        self, prompt: str | Prompt = "", *, sampler: str = "", **options: Any
    ) -> Iterator[SampleState]:
        """Draws only the first sample of `sample` and yields its state after each step.

        prompt  text with which the sample begins, or a `Prompt` of tokens at any positions
        """
        prompted = isinstance(prompt, Prompt)
        asked = {"prompt": "" if prompted else prompt, **options}
        asked |= {"name": sampler} if sampler else {}
        experiment = self.sampling(asked | inputs.of_one(options), prompted=prompted)
        given = prompt if prompted else prompts_of(experiment)[0]
        return watched(experiment, self.params, given, self.programs)

    def logits(
        self, tokens: Any, t: Any = 0.0, context: Mapping[str, Any] | None = None, at: Any = None
    ) -> np.ndarray:
        """Returns the network's logits, float32 [B, L, V], or [L, V] for a single sequence.

        A classifier returns the logits of its C classes, [B, C] or [C].

        tokens   int [B, L] or [L]; the id vocab_size is the mask, if the process has one
        t        time in [0, 1], one number or [B]
        context  other inputs of the network, {name: [B, ...]}
        at       int [B] or one number: the only position of each sequence for which logits are
                 computed, [B, V] or [V]
        """
        return outputs.logits(self, tokens, t, context or {}, at)

    def save(self, path: Any, *, merged: bool = False) -> Place:
        """Writes a folder with parameters, config, tokenizer and a model card; `load` reads it.

        merged: whether adapters are merged into the matrices instead of written separately.
        """
        where = folder.named(path)
        folder.write(without_adapters(self) if merged else self, where)
        return where

    def export(self, path: Any, *, adapters: bool = False, base: str = "") -> Place:
        """Writes a folder in the layout of the original checkpoint, or of one with this network.

        Adapters are merged into the weight matrices. With adapters=True, only the adapters are
        written, in PEFT's layout. base: folder or USER/NAME of their base; "": the published one.
        """
        where = folder.named(path)
        if adapters:
            return peft_writing.write(self, where, base)
        return folder.export(self, where)

    def push(self, name: str, *, private: bool = False, merged: bool = False) -> str:
        """Uploads what `save` writes to the hub as USER/NAME and returns the address."""
        with tempfile.TemporaryDirectory() as temporary:
            return hub.push(self.save(temporary, merged=merged), name, private=private)

    def check_text(self, method: str, text: Any = "") -> None:
        """Raises UserError if the model is not a text model, or `text` is not a string."""
        inputs.check_text(self.domain, method, text)

    def sampling(self, asked: Mapping[str, Any], *, prompted: bool = False) -> Experiment:
        """Returns the experiment with other keys in `sample`; prompted: prompts are ids."""
        check_draws(self.experiment)
        inputs.check_counts(asked, self.config["sample"]["name"])
        config = copy.deepcopy(self.config)
        config["sample"] |= inputs.prompts_and_reward(asked)
        changes = {f"sample.{k}": str(value) for k, value in asked.items() if k != "reward"}
        config_lib.override(config, changes, schema.type_of)
        schema.check_keys(config)
        devices = list(self.experiment.mesh.devices.flat)
        made = build.experiment(config, self.domain, devices, place(self.origin), prompted=prompted)
        own = {"network": self.experiment.network, "mesh": self.experiment.mesh}
        return inputs.opened(made._replace(**own), self.programs)  # compiled for this network

    def bound(self, name: str) -> Any:
        """Returns the named objective; UserError if it is not a bound for the model."""
        return bounds.chosen(self.experiment, name)
