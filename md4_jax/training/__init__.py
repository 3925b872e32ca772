"""The training loop, its step, optimizers, checkpoints and log."""
