"""Losses, and the requirements of losses and samplers on a process and a network."""

from typing import Any, NamedTuple, Protocol

from md4_jax.protocols.batch import Array, Batch
from md4_jax.protocols.network import Denoiser

# Names of the terms of a bound that are not part of its integral or sum over noise levels.
PARTS = ("reconstruction", "prior", "orders", "alignment")
# Names of diagnostics that do not depend on the drawn noise level.
FIXED = ("round", "power_min", "power_mean", "power_max")


class Needs(NamedTuple):
    """Requirements of an objective or a sampler, enforced by `checks.validate`.

    processes         protocols; the process must satisfy at least one of them
    time              its optimal denoiser depends on t: a time-free network is refused
    causal            True: its network must be causal; False: it must not be
    blockwise         its network must be able to work block by block
    mixtures          its network must read a `Mixture`
    gaps              its denoiser must have `gaps`
    edits             its denoiser must have `edits`
    swapped           its denoiser must have `swapped`
    recalls           its denoiser must have `recall`, and read a `Conditioned`
    reads             its blocks must have `reading`
    classifies        its denoiser must have `classify`; False: it must predict tokens
    ordered           its denoiser must have `ordered`, and be time-free
    windows           it reads windows of a token and masks after clean tokens in its network's
                      order, which tells nothing of other orders, and vice versa
    verifies          its network must read clean tokens from left to right, and masks after them:
                      one with a causal context, or one that was trained on windows
    hides             its denoiser must have `within`, and be time-free: its texts change their
                      length, and the padding after them is masked out
    quality           its denoiser must have `quality`
    teacher           its denoiser comes with the `teacher` of the training state
    preferences       its batches have `rejected`
    rewards           its batches are drawn by the model, with `reward` and `advantage`
    parametrisations  allowed values of process.parametrisation; None: any
    why               reason, the end of the error message for time or parametrisation
    """

    processes: tuple[type, ...]
    time: bool = False
    causal: bool = False
    blockwise: bool = False
    mixtures: bool = False
    teacher: bool = False
    parametrisations: tuple[str, ...] | None = None
    why: str = ""
    gaps: bool = False
    edits: bool = False
    swapped: bool = False
    preferences: bool = False
    rewards: bool = False
    recalls: bool = False
    reads: bool = False
    classifies: bool = False
    ordered: bool = False
    hides: bool = False
    windows: bool = False
    verifies: bool = False
    quality: bool = False


class Objective(Protocol):
    """Loss of each sequence: a bound on -log p, or a training-only loss.

    `is_bound(process)` is False for a training-only loss, which is never reported as a likelihood.
    u [B] are antithetic uniforms in [0, 1) over the global batch; the objective maps them to times,
    steps or numbers of masks. keys [B] holds one random key per sequence. The diagnostics include
    the terms of the bound that are named in PARTS.

    Optional attributes:

    is_exact(network)  True if the bound is the negative log-likelihood itself
    time_power         p > 1: the weight at small u is about 1 / u, and evaluation draws u = v^p
                       (`objectives/draws.py`). PARTS and FIXED are not reweighted
    block_times        True if each block has its own time. The call then has a last argument
                       `power`=p, which draws these times early and weights each block; u is then v
    until              above 0: from this step on training uses `afterwards`, with the same
                       diagnostics
    updates            above 1: number of steps with each batch; the denoiser has `behaviour`, the
                       model before the first of them
    for_evaluation()   returns the bound of the same model with the smallest variance, also for a
                       training-only loss; used by `auto`
    is_loose           True if the optimal denoiser's bound is above the entropy
    """

    @property
    def needs(self) -> Needs: ...

    def is_bound(self, process: Any) -> bool: ...

    def __call__(
        self, denoiser: Denoiser, process: Any, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns (nats [B], {name: diagnostic [B]})."""


def updates_of(objective: Objective) -> int:
    """Returns the number of training steps for which an objective uses each batch."""
    return getattr(objective, "updates", 1)
