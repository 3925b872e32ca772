"""A domain that is no text: pixels with values below 256, in three classes."""

import dataclasses
import json

import numpy as np

from md4_jax.data.names import name_of


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Images of a shape, one symbol for each dimension."""

    shape: tuple[int, ...] = (2, 2, 3)

    vocab_size = 256
    unit = "dimension"
    labels = (0, 1, 2)

    def to_json(self):
        return json.dumps({"domain": name_of(Pixels), "shape": self.shape})

    @classmethod
    def from_json(cls, fields, load):
        return cls(tuple(fields["shape"]))

    def decode(self, row):
        return np.asarray(row, np.uint8).reshape(self.shape)
