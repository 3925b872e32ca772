"""An example of everything that can be added to md4_jax from another package."""
