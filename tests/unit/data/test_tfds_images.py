"""Images of TFDS: shapes, classes and splits, without TensorFlow."""

import numpy as np
import pytest
from PIL import Image
from records import prepare, tfds

from md4_jax.data import TfdsImages
from md4_jax.protocols import UserError


def example(split, number):
    image = np.full((4, 5, 3), number, np.uint8)
    image[:, :, 1] = 100 + np.arange(5)
    return {"image": Image.fromarray(image), "label": number % 2}


@pytest.fixture
def prepared(tmp_path):
    """A data set of images in array_record, whose image number is its red."""
    features = {
        "image": tfds.features.Image(shape=(4, 5, 3), encoding_format="png"),
        "label": tfds.features.ClassLabel(names=["even", "odd"]),
    }
    return prepare(tmp_path, {"train": 7, "test": 2}, images=(features, example))


def test_images_and_classes_of_tfds(prepared):
    source = TfdsImages("tiny", data_dir=prepared, validation=3)
    assert source.domain().shape == (4, 5, 3) and source.domain().labels == ("even", "odd")
    for split, numbers in (("train", [0, 1, 2, 3]), ("validation", [4, 5, 6]), ("test", [0, 1])):
        rows = source.rows(split)
        images = rows.tokens.reshape(-1, 4, 5, 3)
        assert images[:, 3, 2].tolist() == [[number, 102, number] for number in numbers]
        assert rows.context["label"].tolist() == [number % 2 for number in numbers]
    assert TfdsImages("tiny", data_dir=prepared, label_key="").domain().labels == ()
    wrong = TfdsImages("tiny", data_dir=prepared, image_shape=(5, 4, 3))
    with pytest.raises(UserError, match=r"tiny, test, example 0: the image is uint8 of shape .4, "):
        wrong.rows("test")


def test_examples_without_a_class_are_refused(tmp_path):
    """TFDS gives those of an unlabelled split the number -1."""
    features = {
        "image": tfds.features.Image(shape=(4, 5, 3), encoding_format="png"),
        "label": tfds.features.ClassLabel(names=["even", "odd"]),
    }
    unlabelled = lambda split, number: example(split, number) | {"label": -(number == 1)}  # noqa: E731
    folder = prepare(tmp_path, {"train": 3}, images=(features, unlabelled))
    with pytest.raises(UserError, match="1 of 3 images of the train split .* is -1, and"):
        TfdsImages("tiny", data_dir=folder).rows("train")
    assert len(TfdsImages("tiny", data_dir=folder, labels=False).rows("train")) == 3


def test_features_that_are_not_there(prepared):
    with pytest.raises(UserError, match=r"no feature 'photo' .data.image_key.; it has image, lab"):
        TfdsImages("tiny", data_dir=prepared, image_key="photo").domain()
    with pytest.raises(UserError, match=r"no feature 'class' .data.label_key."):
        TfdsImages("tiny", data_dir=prepared, label_key="class").domain()
    with pytest.raises(UserError, match=r"'image' .data.label_key. is not a class label"):
        TfdsImages("tiny", data_dir=prepared, label_key="image").domain()
