"""One error names all mistakes of a config that can be seen at once."""

import types

import jax
import pytest

from md4_jax.config import build, schema
from md4_jax.config.mistakes import Mistakes, all_of
from md4_jax.protocols import UserError
from md4_jax.runtime.commit import PACKAGE_ROOT

BASE = str(PACKAGE_ROOT / "configs" / "base.py")
TOKENIZER = types.SimpleNamespace(vocab_size=27, eot_id=None, unit="character", shape=(256,))


def fail(text, kind=UserError):
    def call():
        raise kind(text)

    return call


def mistakes(**values):
    """The messages of a config with 'section__key' values, of one device and a text."""
    asked = {"mesh__data": "1", **values}
    with pytest.raises(UserError) as error:
        config = schema.load_config(BASE, {k.replace("__", "."): v for k, v in asked.items()})
        build.experiment(config, TOKENIZER, jax.devices()[:1])
    return getattr(error.value, "messages", (str(error.value),))


def test_results_come_in_order_if_nothing_is_wrong():
    assert all_of() == []
    assert all_of(lambda: 1, lambda: None, lambda: 2) == [1, None, 2]


def test_a_single_error_is_raised_as_it_is():
    class Own(UserError):
        pass

    for calls in ([fail("a", Own)], [fail("a", Own), int, fail("a", Own)]):
        with pytest.raises(Own, match=r"\Aa\Z"):
            all_of(*calls)


def test_several_errors_are_named_together_and_each_once():
    inner = lambda: all_of(fail("b"), fail("c\nd"))  # noqa: E731
    called = []
    with pytest.raises(Mistakes) as error:
        all_of(fail("a"), inner, fail("b"), lambda: called.append(1))
    assert error.value.messages == ("a", "b", "c\nd")
    assert str(error.value) == "there are 3 mistakes:\n  - a\n  - b\n  - c\n    d"
    assert called == [1]


def test_other_errors_are_not_kept():
    with pytest.raises(ZeroDivisionError):
        all_of(fail("a"), lambda: 1 / 0, fail("b"))


def test_keys_that_do_not_exist_and_wrong_types_are_named_together():
    found = mistakes(
        optim__lerning_rate="1e-3",
        train__num_steps="many",
        netwrk__size="4",
        process__schedule__nam="linear",
        evals__test__drows="2",
    )
    keys = ("'netwrk'", "'lerning_rate'", "'nam'", "train.num_steps", "'drows'")
    assert len(found) == len(keys)
    assert all(key in text for key, text in zip(keys, found, strict=True))
    assert "did you mean 'learning_rate'?" in found[1]


def test_values_that_a_section_refuses_are_named_together():
    found = mistakes(
        train__num_steps="0", sample__temperature="-1", network__heads="0", network__size="7"
    )
    assert found == (
        "train.num_steps must be at least 1, not 0",
        "sample.temperature must not be negative, not -1",
        "network.heads must be at least 1, not 0",
    )


def test_sections_that_do_not_fit_are_named_together():
    found = mistakes(
        data__separate_documents="True",
        log__trackers="tensorbord",
        sample__name="metropolis",
        sample__stride="999",
    )
    assert len(found) == 3
    for words in ("'tensorbord'", "separate_documents=True", "sample.name='metropolis' needs"):
        assert any(words in text for text in found), words
    # The stride of samples is not looked at while the sampler does not fit.


def test_samples_and_evaluators_are_looked_at_together():
    found = mistakes(sample__stride="999", evals__test__stride="998", sample__label="3")
    text = "\n".join(found)
    assert len(found) == 2
    assert "evals.test.stride=998" in text and "sample.label=3" in text


def test_a_mistake_of_the_data_is_told_once_and_not_for_each_evaluator():
    assert len(mistakes(data__lenth="3")) == 1
    found = mistakes(data__lenth="3", evals__test__data__lenght="4")
    assert len(found) == 2
    assert found[0].startswith("unknown key in data 'lenth'")
    assert found[1].startswith("evals.test: unknown key in data 'lenght'")
