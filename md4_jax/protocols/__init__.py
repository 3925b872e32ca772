"""Types shared by all folders of the package: batches, denoisers, and protocols.

Shapes: B sequences, L positions, V clean symbols (0..V-1), S symbols of a process (V, or V + 1
with a mask), D features. Losses are in nats per sequence, unreduced; only `evals/metrics.py`
converts units. Any object with the attributes of a protocol satisfies it; protocols are not base
classes.
"""

from md4_jax.protocols.batch import Array, Batch, Params, Prompt, UserError, batch_of
from md4_jax.protocols.inputs import Conditioned, Mixture
from md4_jax.protocols.network import Accelerator, Blockwise, Denoiser, Network
from md4_jax.protocols.objective import FIXED, PARTS, Needs, Objective, updates_of
from md4_jax.protocols.ordered import Ordered
from md4_jax.protocols.process import Process, Schedule
from md4_jax.protocols.trees import pytree

__all__ = [
    "FIXED", "PARTS", "Accelerator", "Array", "Batch", "Blockwise", "Conditioned", "Denoiser",
    "Mixture", "Needs", "Network", "Objective", "Ordered", "Params", "Process", "Prompt",
    "Schedule", "UserError", "batch_of", "pytree", "updates_of",
]  # fmt: skip
