"""Source of text with known entropy: a Markov chain over four letters."""

from pathlib import Path

import numpy as np

LETTERS = "abcd"
LENGTH = 12
CHAIN = np.array(
    [[0.1, 0.7, 0.1, 0.1], [0.05, 0.05, 0.85, 0.05], [0.6, 0.1, 0.1, 0.2], [0.3, 0.1, 0.1, 0.5]]
)


def stationary() -> np.ndarray:
    """Returns the stationary distribution of the chain [4]."""
    values, vectors = np.linalg.eig(CHAIN.T)
    first = np.real(vectors[:, np.argmax(np.real(values))])
    return first / first.sum()


def draw(seed: int, count: int) -> np.ndarray:
    """Draws count sequences of LENGTH letters, int [count, LENGTH]."""
    u = np.random.default_rng(seed).random((count, LENGTH))
    x = np.zeros((count, LENGTH), int)
    x[:, 0] = np.searchsorted(np.cumsum(stationary()), u[:, 0])
    for n in range(1, LENGTH):
        x[:, n] = (np.cumsum(CHAIN, axis=1)[x[:, n - 1]] < u[:, n : n + 1]).sum(axis=1)
    return np.minimum(x, 3)


def nats_per_token(x: np.ndarray) -> float:
    """Returns -log p(x) under the chain, as a mean over all letters of x."""
    nats = -np.log(stationary()[x[:, 0]]) - np.log(CHAIN[x[:, :-1], x[:, 1:]]).sum(axis=1)
    return float(nats.mean() / LENGTH)


def write(path: Path, train: int, test: int) -> tuple[str, float]:
    """Writes a text of train + LENGTH + test sequences.

    Returns the config keys that read it, with splits in this order, and -log p of the test split in
    nats per letter.
    """
    x = draw(0, train + LENGTH + test)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(LETTERS[letter] for letter in x.ravel()))
    keys = f"data.name=text data.path={path} data.length={LENGTH} tokenizer.name=characters "
    keys += f"tokenizer.alphabet={LETTERS} data.validation={LENGTH * LENGTH} "
    return keys + f"data.test={LENGTH * test}", nats_per_token(x[-test:])
