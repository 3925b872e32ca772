"""Causal models that judge texts: runs, published models, and models of transformers."""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.data.tokenizers import END_OF_TEXT
from md4_jax.evals.judged import Judged, decoded, encoded, padded
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.texts import Row, bucket, score_rows
from md4_jax.evals.transformers_judge import MARK, TransformersJudge, check_readable
from md4_jax.experiment import Experiment
from md4_jax.objectives.autoregressive import Autoregressive
from md4_jax.protocols import Array, Network, Params, UserError, batch_of
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.paths import place
from md4_jax.runtime.sharding import batch_shards, local_rows, to_global, to_host
from md4_jax.runtime.stopping import stop_if_asked
from md4_jax.runtime.tensors import is_folder

# Prefixes of names that are not directories -> the packages that read them, and their extra.
PACKAGES = {MARK: (("torch", "transformers"), "judge"), "hf:": (("huggingface_hub",), "hub")}
NOT_CAUSAL = "is not causal: give a run or a model with network.causal=True"


def check_source(key: str, name: str, is_causal: Callable[[str, str], bool]) -> None:
    """Raises UserError for a judge that cannot be read, at start-up instead of at its first use.

    A model on the hub is fetched. is_causal: (key, source) -> whether its network is causal
    """
    _check_packages(key, name)
    if name.startswith(MARK):
        check_readable(key, name.removeprefix(MARK))
        return
    if not name.startswith(tuple(PACKAGES)):
        _check_folder(key, name)
    if not is_causal(key, name):
        raise UserError(f"{key}={name} {NOT_CAUSAL}")


def _check_packages(key: str, name: str) -> None:
    """Raises UserError if a package that reads this judge is not installed."""
    for mark, (packages, extra) in PACKAGES.items():
        lacking = [p for p in packages if importlib.util.find_spec(p) is None]
        if name.startswith(mark) and lacking:
            raise UserError(
                f"{key}={name} needs {' and '.join(lacking)}: pip install -e '.[{extra}]'"
            )


def _check_folder(key: str, name: str) -> None:
    """Raises UserError for a directory without a model."""
    folder = place(name, key)
    if not folder.is_dir():
        raise UserError(f"{key}={name} is not the directory of a run or of a model")
    of_run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if not is_folder(folder) and not any((of_run / "checkpoints").glob("[0-9]*")):
        raise UserError(
            f"{key}={name} contains neither a run with a checkpoint nor a model in *.safetensors"
        )


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
            stop_if_asked()
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
        programs[kept] = TransformersJudge(key, source.removeprefix(MARK))
    else:
        other, params, is_own = run_of(key, source)
        if not other.network.causal:
            raise UserError(f"{key}={source} {NOT_CAUSAL}")
        programs[kept] = (RunJudge if is_own else PublishedJudge)(other, params, programs)
    return programs[kept]


def mauve(found: np.ndarray, theirs: np.ndarray, seed: int = 0) -> float:
    """Computes MAUVE (arXiv:2102.01454) of two sets of features [N, D] with the mauve library."""
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise UserError("mauve=True needs mauve-text: pip install -e '.[judge]'") from error
    result = compute_mauve(p_features=theirs, q_features=found, seed=seed, verbose=False)
    return float(result.mauve)
