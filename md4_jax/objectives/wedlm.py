"""Loss of WeDLM, with masked blocks beside the clean text: docs/families/wedlm.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.eso import EsoOrders
from md4_jax.objectives.left_to_right import check_left_to_right, next_token_nats
from md4_jax.objectives.noising import masked
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.order import tokens_first
from md4_jax.protocols import Array, Batch, Blockwise, Denoiser, Needs, Network, UserError


@dataclasses.dataclass(frozen=True)
class WeDLM:
    """Masked diffusion in blocks, in a causal network that reads tokens before masks.

    Dual-stream masking, WeDLM (arXiv:2512.22737, eq. 10), in nats per sequence [B]:

        L(x) = sum_b E_k[ n_b / k E_z[ sum_{n in b, z_n = m} -log mu_n(x_{<b}, z_b)[x_n] ] ]

    Block b has n_b tokens that count, k ~ U{1..n_b} of which are masked in z. A mask sees the clean
    tokens of earlier blocks, all tokens of its block that are not masked, and the masks before it
    in the block: what `Streaming` shows it when its window begins with the block. The network reads
    z and the clean text in one pass, as ordered.streams.

    block_size     positions of a block. The last block may be shorter. Samples are not drawn in
                   blocks, so this is no `block`
    left_to_right  weight of the cross-entropy of each token in the clean stream given those before
                   it, which the same pass predicts at the token to its left. A training-only loss
                   above 0
    weights        'bound', or 'equal': each block weighs 1, whatever its number of masks. A
                   training-only loss

    Without both the loss is the bound for a sampler that draws blocks from left to right, and the
    tokens of a block one at a time in random order. `for_evaluation` is the exact likelihood of
    drawing all tokens from left to right. The schedule has no effect. Tokens that do not count are
    never masked.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), ordered=True)
    # Fraction of diffusion for samplers and bounds in an order: none, as in `for_evaluation`.
    alpha_0: ClassVar[float] = 0.0

    block_size: int = 32
    left_to_right: float = 1.0
    weights: str = "bound"

    def __post_init__(self):
        check_left_to_right(self.left_to_right)
        if self.block_size < 1:
            raise UserError(f"objective.block_size must be at least 1, not {self.block_size}")
        BlockDiffusion(weights=self.weights)  # refuses other weights

    @property
    def stream_block(self) -> int:
        """Positions of a block in the pass of noisy symbols and clean text."""
        return self.block_size

    @property
    def _in_blocks(self) -> BlockDiffusion:
        return BlockDiffusion(self.block_size, weights=self.weights)

    def is_bound(self, process: RevealsMasks) -> bool:
        return self._in_blocks.is_bound(process) and not self.left_to_right

    def for_evaluation(self) -> EsoOrders:
        """Returns the likelihood of drawing tokens from left to right, each at a single mask."""
        return EsoOrders(self.alpha_0)

    def is_exact(self, network: Network) -> bool:
        return self.block_size == 1 and self.is_bound(None)

    def __call__(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, _ = self._in_blocks.noised(process, batch, u, keys)
        return self.loss_at(denoiser, process, batch, z)

    def loss_at(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns the loss at z [B], whose mean is that of the objective, and its parts."""
        streams = self._streams(denoiser, process, batch, z)
        noise_BxG = jnp.ones((len(z), -(-z.shape[1] // self.block_size)))  # the network has no time
        nats = self._in_blocks.loss_at(streams, process, batch, z, noise_BxG)
        extra = {"masked": masked(process, z)}
        if self.left_to_right:
            extra["left_to_right"] = next_token_nats(streams, batch)
            nats = nats + self.left_to_right * extra["left_to_right"]
        return nats, extra

    def _streams(
        self, denoiser: Denoiser, process: RevealsMasks, batch: Batch, z: Array
    ) -> Denoiser:
        """Returns a denoiser whose functions by blocks give the features of one pass of both."""
        x, length = batch.tokens, batch.tokens.shape[1]
        place = jnp.broadcast_to(jnp.arange(length), x.shape)
        rank = tokens_first(process.is_noise(z), place, length)
        index = None if self.left_to_right else place  # None: both streams
        round = place // self.block_size
        h = denoiser.ordered.streams(z, x, jnp.zeros(len(x)), rank, round, index)
        blocks = Blockwise(lambda *_: h[:, :length], None, None, reading=lambda *_: h[:, length:])
        return denoiser._replace(blocks=blocks)
