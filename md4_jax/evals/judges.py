"""Causal models that judge texts: runs, published models, and models of transformers."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.data.tokenizers import END_OF_TEXT
from md4_jax.evals.judged import Judged, decoded, encoded, padded
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.texts import Row, bucket, score_rows
from md4_jax.experiment import Experiment
from md4_jax.objectives.autoregressive import Autoregressive
from md4_jax.protocols import Array, Network, Params, UserError, batch_of
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.paths import place
from md4_jax.runtime.sharding import batch_shards, local_rows, to_global, to_host
from md4_jax.runtime.tensors import is_folder

MARK = "transformers:"
# Prefixes of names that are not directories -> the packages that read them, and their extra.
PACKAGES = {MARK: (("torch", "transformers"), "judge"), "hf:": (("huggingface_hub",), "hub")}
NOT_CAUSAL = "is not causal: give a run or a model with network.causal=True"


def check_source(key: str, name: str, is_causal: Callable[[str, str], bool]) -> None:
    """Raises UserError for a judge that cannot be read, at start-up instead of at its first use.

    is_causal: (key, directory) -> whether its network is causal
    """
    for mark, (packages, extra) in PACKAGES.items():
        if name.startswith(mark):
            if lacking := [p for p in packages if importlib.util.find_spec(p) is None]:
                raise UserError(
                    f"{key}={name} needs {' and '.join(lacking)}: pip install -e '.[{extra}]'"
                )
            return
    folder = place(name, key)
    if not folder.is_dir():
        raise UserError(f"{key}={name} is not the directory of a run or of a model")
    of_run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if not is_folder(folder) and not any((of_run / "checkpoints").glob("[0-9]*")):
        raise UserError(
            f"{key}={name} contains neither a run with a checkpoint nor a model in *.safetensors"
        )
    if not is_causal(key, name):
        raise UserError(f"{key}={name} {NOT_CAUSAL}")


@dataclasses.dataclass(frozen=True)
class RunJudge:
    """Causal run of this package, which also gives a probability to the first token of a text."""

    experiment: Experiment
    params: Params
    programs: dict

    counts_first: ClassVar[bool] = True

    @property
    def length(self) -> int:
        """Returns the largest number of tokens of a text."""
        return self.experiment.data.length

    def tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of texts; END_OF_TEXT is encoded as the end-of-text token."""
        domain = self.experiment.domain
        id_of = getattr(domain.tokenizer, "id_of", lambda entry: None)
        if self.end is None or id_of(END_OF_TEXT) is not None:
            return [np.asarray(domain.encode(text), np.int32) for text in texts]
        # The tokenizer would encode it as ordinary characters.
        return [encoded(domain.encode, text, self.end) for text in texts]

    def counted(self, text: str, ids: np.ndarray) -> str:
        """Returns the part of a text that its first tokens `ids` cover."""
        return decoded(self.experiment.domain.decode, ids, self.end)

    @property
    def end(self) -> int | None:
        """Returns the id of the end-of-text token; None if there is none."""
        return self.experiment.domain.eot_id

    def judge(self, ids: list[np.ndarray], batch_size: int) -> Judged:
        """Returns the costs of texts, given their tokens."""
        rows = [
            Row(i, row, np.ones(len(row), bool), np.zeros_like(row)) for i, row in enumerate(ids)
        ]
        bound = LikelihoodBound(Autoregressive(), batch_size=batch_size)
        nats, _ = score_rows(self.experiment, self.params, rows, bound, self.programs)
        return Judged(nats, np.array([len(row) for row in ids]), ids)

    def features(self, ids: list[np.ndarray], batch_size: int) -> np.ndarray:
        """Returns the features that predict the last token of each text: float32 [N, D]."""
        at = np.array([len(row) - 1 for row in ids], np.int32)
        return self._computed(_features, (self._read(ids), at), batch_size)

    def _read(self, ids: list[np.ndarray]) -> np.ndarray:
        """Returns the inputs of the network: the mask as a start token, then the text."""
        mask = self.experiment.process.mask_id
        return padded([row[:-1] for row in ids], mask, self._bucket(ids), begin=1)

    def _bucket(self, ids: list[np.ndarray]) -> int:
        """Returns the padded length of texts: one of a few, so that few programs are compiled."""
        return bucket(max(map(len, ids)), self.length)

    def _computed(
        self, make: Callable, arrays: tuple[np.ndarray, ...], batch_size: int
    ) -> np.ndarray:
        """Applies the function `make`(network) to these arrays, in batches."""
        mesh, network, count = self.experiment.mesh, self.experiment.network, len(arrays[0])
        size = -(-batch_size // batch_shards(mesh)) * batch_shards(mesh)
        kept, found = ("judge", make, network), []
        if kept not in self.programs:
            self.programs[kept] = jit(make(network), mesh, network)
        for first in range(0, count, size):
            rows = np.minimum(np.arange(first, first + size), count - 1)
            own = rows[local_rows(mesh, size)]
            batch = to_global(tuple(array[own] for array in arrays), mesh)
            with jax.set_mesh(mesh):
                found.append(to_host(self.programs[kept](self.params, *batch)))
        return np.concatenate(found)[:count]


def _features(network: Network) -> Callable:
    """Makes (params, z [B, L], at [B]) -> features of the network at a position [B, D]."""

    def features(params: Params, z: Array, at: Array) -> Array:
        h_BxLxD = network.denoiser(params).features(z, jnp.zeros(len(z)))
        found = jnp.take_along_axis(h_BxLxD, at[:, None, None], axis=1)[:, 0]
        return found.astype(jnp.float32)

    return features


def _costs(network: Network) -> Callable:
    """Makes (params, z [B, L], after [B, L], counts [B, L]) -> -log p(after | z) [B]."""

    def costs(params: Params, z: Array, after: Array, counts: Array) -> Array:
        denoiser, t = network.denoiser(params), jnp.zeros(len(z))
        batch = batch_of(after, loss_mask=counts)
        return Autoregressive().loss_at(denoiser, params["process"], batch, z, t)

    return costs


class PublishedJudge(RunJudge):
    """Causal model of another project, computed by this package.

    As usual, the first token of a text has no probability, because the network has no input before
    it.
    """

    counts_first: ClassVar[bool] = False

    def counted(self, text: str, ids: np.ndarray) -> str:
        """Returns the part of a text that its first tokens `ids` cover, except the first one."""
        return super().counted(text, ids[1:])

    def judge(self, ids: list[np.ndarray], batch_size: int) -> Judged:
        """Returns the costs of texts, given their tokens; the first token has no cost."""
        sizes, z = np.array([len(row) - 1 for row in ids]), self._read(ids)
        after = padded([row[1:] for row in ids], 0, z.shape[1])
        counts = np.arange(z.shape[1]) < sizes[:, None]
        nats = self._computed(_costs, (z, after, counts), batch_size)
        return Judged(nats.astype(np.float64), sizes, ids)

    def _read(self, ids: list[np.ndarray]) -> np.ndarray:
        """Returns the inputs of the network: the text."""
        return padded(ids, 0, self._bucket(ids))


def opened(
    key: str, source: str, run_of: Callable, programs: dict
) -> "RunJudge | TransformersJudge":
    """Returns the judge of this name, loading it at the first call; UserError names the key.

    run_of    (key, source) -> (experiment, params, is_own) of a model
    programs  cache of compiled functions, and of judges
    """
    kept = ("judge", source)
    if kept in programs:
        return programs[kept]
    if source.startswith(MARK):
        programs[kept] = TransformersJudge(source.removeprefix(MARK))
    else:
        other, params, is_own = run_of(key, source)
        if not other.network.causal:
            raise UserError(f"{key}={source} {NOT_CAUSAL}")
        programs[kept] = (RunJudge if is_own else PublishedJudge)(other, params, programs)
    return programs[kept]


class TransformersJudge:
    """Causal model of the transformers library, from the hub or a folder, on CPU or GPU.

    The first token of a text has no probability, because the model has no input before it.
    """

    counts_first: ClassVar[bool] = False

    def __init__(self, name: str):
        import torch
        import transformers

        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise UserError(f"judge={MARK}{name} cannot be read: {error}") from error
        self._torch, self._device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(self._device).eval()

    @property
    def length(self) -> int:
        """Returns the largest number of tokens of a text."""
        return int(getattr(self._model.config, "max_position_embeddings", 1024))

    @property
    def end(self) -> int | None:
        """Returns the id of the end-of-text token; None if there is none."""
        return self._tokenizer.eos_token_id

    def tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of texts; END_OF_TEXT is encoded as the end-of-text token."""
        texts = [self._marked(text) for text in texts]
        found = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [np.asarray(row, np.int32) for row in found]

    def counted(self, text: str, ids: np.ndarray) -> str:
        """Returns the part of a text that its first tokens `ids` cover, except the first one."""
        if not self._tokenizer.is_fast:
            plain = functools.partial(self._tokenizer.decode, clean_up_tokenization_spaces=False)
            return decoded(lambda own: plain(own.tolist()), ids[1:], self.end)
        text = self._marked(text)
        given = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = given["offset_mapping"]
        covered = text[places[0][1] : places[len(ids) - 1][1]]
        return covered.replace(self._end_of_text, END_OF_TEXT)

    def _marked(self, text: str) -> str:
        """Replaces END_OF_TEXT by the tokenizer's own end-of-text token."""
        return text.replace(END_OF_TEXT, self._end_of_text)

    @functools.cached_property
    def _end_of_text(self) -> str:
        """The vocabulary's end-of-text token; END_OF_TEXT if it contains that, or has none."""
        known = self.end is None or END_OF_TEXT in self._tokenizer.get_vocab()
        return END_OF_TEXT if known else self._tokenizer.eos_token

    def judge(self, ids: list[np.ndarray], batch_size: int) -> Judged:
        """Returns the costs of texts, given their tokens; the first token has no cost."""
        torch, nats = self._torch, []
        for filled, sizes, out in self._outputs(ids, batch_size):
            logits = torch.log_softmax(out.logits[:, :-1].float(), dim=-1)
            picked = -logits.gather(-1, filled[:, 1:, None])[..., 0]
            counts = torch.arange(1, filled.shape[1], device=self._device) < sizes[:, None]
            nats.append(torch.where(counts, picked, 0.0).double().sum(dim=1).cpu().numpy())
        return Judged(np.concatenate(nats), np.array([len(row) - 1 for row in ids]), ids)

    def features(self, ids: list[np.ndarray], batch_size: int) -> np.ndarray:
        """Returns the last hidden state of the last token of each text: float32 [N, D]."""
        found = []
        for _, sizes, out in self._outputs(ids, batch_size):
            rows = self._torch.arange(len(sizes), device=self._device)
            found.append(out.hidden_states[-1][rows, sizes - 1].float().cpu().numpy())
        return np.concatenate(found)

    def _outputs(self, ids: list[np.ndarray], batch_size: int) -> Iterator[tuple]:
        """Yields (tokens [B, L], number of tokens [B], outputs of the model)."""
        torch = self._torch
        for first in range(0, len(ids), batch_size):
            rows = ids[first : first + batch_size]
            sizes = torch.tensor([len(row) for row in rows], device=self._device)
            filled = padded(rows, 0, max(map(len, rows))).astype(np.int64)
            tokens = torch.tensor(filled, device=self._device)
            mask = torch.arange(tokens.shape[1], device=self._device) < sizes[:, None]
            with torch.no_grad():
                yield (
                    tokens,
                    sizes,
                    self._model(
                        input_ids=tokens, attention_mask=mask.long(), output_hidden_states=True
                    ),
                )


def mauve(found: np.ndarray, theirs: np.ndarray, seed: int = 0) -> float:
    """Computes MAUVE (arXiv:2102.01454) of two sets of features [N, D] with the mauve library."""
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise UserError("mauve=True needs mauve-text: pip install -e '.[judge]'") from error
    result = compute_mauve(p_features=theirs, q_features=found, seed=seed, verbose=False)
    return float(result.mauve)
