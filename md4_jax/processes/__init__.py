"""Forward processes q(z_t | x) by their name in a config."""

from md4_jax.processes.masking import Masking
from md4_jax.processes.state_dependent import StateDependent

PROCESSES = {
    "masking": Masking,
    "state_dependent": StateDependent,
}
