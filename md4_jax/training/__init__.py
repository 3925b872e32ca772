"""Training loop, training step, optimizers, checkpoints and log."""
