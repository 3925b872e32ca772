"""Forward processes q(z_t | x) by their name in a config."""

from md4_jax.processes.masking import Masking

PROCESSES = {
    "masking": Masking,
}
