"""Sequences on which tools/variance.py measures the noise of a gradient."""

import numpy as np
import pytest
from tool_modules import tool_module

from md4_jax.data.prepare import stream
from md4_jax.data.shards import TokenShards
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.tokenizers import Bytes
from md4_jax.protocols import UserError


@pytest.fixture(scope="module")
def tool():
    return tool_module("variance")


def test_sequences_of_shards_are_those_of_an_array(tool, tmp_path):
    (tmp_path / "a.txt").write_text("".join(map(chr, range(32, 127))))
    source = TextFiles(str(tmp_path / "a.txt"), validation=0, test=0)
    shards = stream(source, Bytes(), "train", str(tmp_path / "store"))
    assert isinstance(shards, TokenShards)
    found = tool.drawn(shards, 5, 3, 4)
    assert found.shape == (3, 4, 5) and found.dtype == np.int32
    assert len(np.unique(found[..., 0])) > 5
    np.testing.assert_array_equal(found, tool.drawn(shards[:], 5, 3, 4))
    np.testing.assert_array_equal(found - found[..., :1], np.broadcast_to(range(5), found.shape))


def test_a_split_has_at_least_one_sequence(tool):
    assert tool.drawn(np.arange(5), 5, 1, 2).tolist() == [[[0, 1, 2, 3, 4]] * 2]
    with pytest.raises(UserError, match=r"the split has 4 tokens, fewer .* data.length=5: take"):
        tool.drawn(np.arange(4), 5, 1, 2)
