"""Transformer: bidirectional as in MD4 or causal, with or without time conditioning."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.networks.adapters import check_adapters
from md4_jax.networks.attention import KERNELS, kernel_for
from md4_jax.networks.binding import Binding
from md4_jax.networks.condition import ACTIVATED, TIME_EMBEDDINGS
from md4_jax.networks.context import check_options
from md4_jax.networks.depth import REMAT, unrolled
from md4_jax.networks.experts import SCORES, check_experts
from md4_jax.networks.feed_forward import PLAIN
from md4_jax.networks.flops import formula
from md4_jax.networks.growing import check_growing, symbols_read
from md4_jax.networks.layers import FIRST, SECOND
from md4_jax.networks.linear import ADAPTERS, INITIAL, rounded
from md4_jax.networks.lists import counts_of
from md4_jax.networks.ordered import reads_in_order
from md4_jax.networks.products import PRODUCTS, products_for
from md4_jax.networks.quality import Judged
from md4_jax.networks.rotary import RAMPS, ROUNDED, Positions, check_rotary
from md4_jax.networks.rows import Rows
from md4_jax.networks.shift import check_context, check_shifted
from md4_jax.networks.trunk import TransformerModule
from md4_jax.protocols import Array, Network, UserError

CHOICES = {
    "attention": KERNELS,
    "condition_activation": ACTIVATED,
    "dtype": ("float32", "bfloat16"),
    "feed_forward": ("swiglu", "glu", "geglu", "gelu", "gelu_exact"),
    "initial": INITIAL,
    "norm": ("rms", "layer"),
    "norm_parameters": ("auto", "scale", "affine"),
    "output": ("categorical", "truncated_logistic"),
    "parameters": ("float32", "bfloat16"),
    "products": PRODUCTS,
    "remat": tuple(REMAT),
    "rotary_ramp": RAMPS,
    "rotary_type": ROUNDED,
    "router": tuple(SCORES),
    "time_embedding": tuple(TIME_EMBEDDINGS),
}
RATES = ("dropout", "attention_dropout", "embedding_dropout", "label_dropout", "lora_dropout")
NOT_NEGATIVE = ("depth", "hidden", "kv_heads", "head_dim", "embedding", "condition", "local_width")
NOT_NEGATIVE += ("classes", "tables_tokens", "tables_hidden", "lora_rank", "experts", "balance")
NOT_NEGATIVE += ("expert_hidden", "shared_hidden", "dense_layers", "router_z", "positions")


@dataclasses.dataclass(frozen=True)
class Transformer(Positions, Judged):
    """Options of the transformer; `build()` makes the network. Those of Positions and Judged, and

    hidden             width of the feed-forward layer; 0: 8/3 of size, rounded up to a multiple of
                       64, or 4 size without gates
    feed_forward       swiglu, gated by silu; glu, gated by a sigmoid, which is then the activation
                       of the condition too; geglu, gated by GELU; gelu, two layers with biases;
                       gelu_exact, the same without the tanh approximation of GELU
    kv_heads           heads of keys and values, for grouped-query attention; 0: same as heads
    head_dim           features of a head; 0: size / heads
    qkv_bias, out_bias  whether queries, keys and values have a bias, and attention's output
    positions          number of learned position embeddings, used instead of rotary positions; it
                       is the largest length of a text. 0: rotary positions
    shifted            computes the logits of a position from the features of the previous one, as
                       in models adapted from autoregressive ones (Dream, arXiv:2508.15487)
    embedding          width of the token vectors, before a linear layer to size; 0: size
    condition          width of the vector of time and class that conditions layers; 0: size
    condition_activation  applied to the sum of the vectors of time and class, or to each of the
                       two before they are added, as in UDLM's code (arXiv:2412.10193)
    time_embedding     plain; md4, with a first layer of four times the width; dit, with 256
                       sinusoids of the time itself
    time_conditioning  conditions layers on t by adaLN-zero; False: no time input
    products           operands of linear layers and attention, with float32 sums: float32, on
                       TPUs and GPUs as XLA rounds them; bfloat16; or auto, bfloat16 on CPUs
                       that have instructions for it
    scan_blocks        compiles one block for all depths; unrolled blocks are faster on CPUs
    remat              what the backward pass recomputes to save memory: nothing (none), all but
                       matrix products (dots), or whole blocks (full)
    causal             causal attention: a position sees nothing to its right
    causal_context     in block diffusion, causal attention among clean tokens
                       (Nemotron-Labs-Diffusion, arXiv:2607.05722)
    output             categorical, a logit for each symbol, or for ordered symbols
                       truncated_logistic, a location and a scale
    attention          kernel: plain, splash (TPU), cudnn (NVIDIA), or auto, the platform's best
    classes            number of class labels, which condition layers like the time
    norm               rms, or layer, which also subtracts the mean
    norm_parameters    auto, a gain if there is no condition; scale, a gain; affine, gain and bias
    head_bias, tied    bias of the head; whether its matrix is that of the embedding
    initial            initial values: lecun; depth_scaled, with a variance of 2 / (depth in) in
                       feed-forward layers; torch, PyTorch's uniform ones
    dropout            dropout rate of both branches of a block
    dropout_shared     drops the same features at all positions of a sequence
    attention_dropout, embedding_dropout  the same for softmax weights and embedded tokens
    label_dropout      probability of hiding a label in training, to learn without it too
    tables             largest number of counts of each table of `Tables`; 0: no tables
    tables_tokens      largest number of tokens of the training text to count before the first step
    tables_hidden      units of the network that corrects their sum for each symbol; 0: none
    experts            number of experts in each feed-forward layer; each token uses
                       `experts_per_token` of them (`experts.Experts`); 0: a dense layer
    expert_hidden      width of an expert; 0: hidden
    shared_hidden      width of a shared expert, which all tokens use; 0: none
    dense_layers       number of first blocks with a dense feed-forward layer of width `hidden`
    router, router_...  how experts are chosen and weighted (`experts.Router`)
    balance, router_z  weights of `experts.imbalance` and of `experts.size_of_logits` in the
                       gradient of nats per token
    lora_rank          rank of the adapters of the linear layers in attention and feed-forward
                       (LoRA, arXiv:2106.09685), except experts and their router; 0: none. Only
                       adapters are trained
    lora_alpha         the output of an adapter is multiplied by lora_alpha / lora_rank
    lora_dropout       dropout rate of the inputs of adapters, drawn for each adapter; the adapted
                       matrices have no such dropout
    gaps               also predicts the missing tokens in each gap of a variable-length text
    edits              also predicts which masks of such a text are deleted, and their replacements
    parameters         type in which parameters that are not trained are stored
    """

    # Overridden by networks that are made of the same blocks.
    takes: ClassVar[tuple[str, ...]] = ("segments", "label")
    grid: ClassVar[tuple[int, ...]] = ()  # sides of the grid of rotary positions; (): a line
    rotary: ClassVar[bool] = True
    has_vectors: ClassVar[bool] = True  # whether each symbol has a learned vector
    hidden_dropout: ClassVar[float] = 0.0
    reach, bare, joint_norm, convolution = None, False, False, 0  # of other networks

    vocab_size: int
    size: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 0
    feed_forward: str = "swiglu"
    kv_heads: int = 0
    head_dim: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    positions: int = 0
    shifted: bool = False
    embedding: int = 0
    condition: int = 0
    condition_activation: str = "sum"
    time_conditioning: bool = True
    time_embedding: str = "plain"
    norm: str = "rms"
    norm_parameters: str = "auto"
    norm_eps: float = 1e-6
    head_bias: bool = True
    tied: bool = False
    initial: str = "lecun"
    dropout: float = 0.0
    dropout_shared: bool = False
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    qk_norm: bool = False
    local_width: int = 0
    scan_blocks: bool = True
    remat: str = "none"
    dtype: str = "float32"
    products: str = "float32"
    causal: bool = False
    causal_context: bool = False
    output: str = "categorical"
    attention: str = "auto"
    classes: int = 0
    label_dropout: float = 0.0
    tables: int = 0
    tables_tokens: int = 2**25
    tables_hidden: int = 0
    experts: int = 0
    experts_per_token: int = 2
    expert_hidden: int = 0
    shared_hidden: int = 0
    dense_layers: int = 0
    router: str = "softmax"
    router_normalised: bool = False
    router_scale: float = 1.0
    router_bias: bool = False
    router_groups: int = 1
    router_groups_taken: int = 1
    router_block: int = 0
    router_block_taken: int = 0
    balance: float = 0.0
    router_z: float = 0.0
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    parameters: str = "float32"
    gaps: bool = False
    edits: bool = False

    def __post_init__(self):
        check_options(self, CHOICES, RATES, size=1, heads=1, **dict.fromkeys(NOT_NEGATIVE, 0))
        if not self.head_dim and self.size % (2 * self.heads):
            raise UserError(
                f"network.size={self.size} must be a multiple of twice network.heads={self.heads} "
                "(rotary positions need an even head size), or set network.head_dim"
            )
        if self.head_dim % 2 and not self.positions:
            raise UserError(f"network.head_dim={self.head_dim} must be even, for rotary positions")
        check_shifted(self)
        check_context(self)
        check_growing(self)
        if self.norm_eps <= 0:
            raise UserError(f"network.norm_eps={self.norm_eps} must be above 0")
        check_rotary(self)
        check_experts(self)
        if self.kv_heads and self.heads % self.kv_heads:
            raise UserError(
                f"network.kv_heads={self.kv_heads} must divide network.heads={self.heads}"
            )
        check_adapters(self)
        if self.tied and (self.embedding or self.is_ordinal):
            raise UserError(
                "network.tied=True needs network.output=categorical and network.embedding=0, so "
                "that the output layer can use the matrix of the embedding"
            )

    @property
    def shared_places(self) -> tuple[int, ...]:
        """Branches with the same dropout at all positions."""
        return (FIRST, SECOND) if self.dropout_shared else ()

    @property
    def attention_size(self) -> int:
        """Features of a head of attention."""
        return self.head_dim or self.size // self.heads

    @property
    def is_ordinal(self) -> bool:
        """Whether the head treats the symbols as ordered."""
        return self.output == "truncated_logistic"

    @property
    def pads_logits(self) -> bool:
        """Whether few logits are beyond the vocabulary, so that -inf is cheaper than a slice."""
        beyond = rounded(symbols_read(self) if self.tied else self.vocab_size) - self.vocab_size
        return 0 < beyond < self.vocab_size // 8 and not (self.tables or self.is_ordinal)

    def of_layer(self, number: int) -> "Transformer":
        """Returns the options of an unrolled block, by its index."""
        return self

    def resolved(self, platform: str) -> "Transformer":
        """Returns the options with widths and kernel in place of 0 and auto."""
        kernel = kernel_for(self.attention, platform, self.attention_size, self.dtype)
        gated = -(-8 * self.size // (3 * 64)) * 64
        hidden = self.hidden or (4 * self.size if self.feed_forward in PLAIN else gated)
        kv_heads = self.kv_heads or self.heads
        return dataclasses.replace(
            self, attention=kernel, hidden=hidden, kv_heads=kv_heads,
            expert_hidden=self.expert_hidden or hidden,
            products=products_for(self.products, platform, self.dtype),
        )  # fmt: skip

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        module = TransformerModule(
            options, unroll=unrolled(options, platform), by_symbol=platform == "cpu"
        )

        def init(key: Array):
            # Not unrolled: on a GPU XLA takes minutes to initialise 12 unrolled blocks.
            rolled, tokens = TransformerModule(options), jnp.zeros((1, 2), jnp.int32)
            return rolled.init(key, tokens, jnp.zeros((1,)))["params"]

        # A convolution, tables and a causal mask reach across the borders of blocks.
        blockwise = not (self.causal or self.local_width or self.tables or self.gaps)
        cached = blockwise or (self.causal and not self.tables)
        hides = not (self.causal or self.tables or self.gaps)
        bind = Binding(options, module, cached, platform, hides)
        return Network(
            init, bind, not self.time_conditioning, self.causal, blockwise,
            formula(options, self.depth), self._padding(), options.products, self.counts,
            mixtures=not (self.tables or self.gaps), adapters=self.adapters,
            parameters=self.parameters, gaps=self.gaps, edits=self.edits,
            reads=self.causal_context, splits=not (self.tables or self.gaps),
            ordered=reads_in_order(self), hides=hides,
        )  # fmt: skip

    @property
    def adapters(self) -> str:
        """Regular expression of the paths of the adapters' parameters; '' without adapters."""
        return ADAPTERS if self.lora_rank else ""

    @property
    def counts(self) -> Rows | None:
        """Tables of counts beside the network."""
        return counts_of(self.vocab_size, self.tables, self.tables_tokens) if self.tables else None

    def _padding(self) -> int:
        """Returns the number of entries of embedding and head that stand for no symbol."""
        symbols = self.vocab_size
        of_embedding = rounded(symbols_read(self)) - symbols_read(self)
        entries = of_embedding * (self.embedding or self.size)
        if self.tied:
            return entries + (rounded(symbols_read(self)) - symbols) * self.head_bias
        columns = 0 if self.is_ordinal else rounded(symbols) - symbols
        return entries + columns * (self.size + self.head_bias)
