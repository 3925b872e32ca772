"""A real TFDS data set, written by TFDS in array_record, which needs no TensorFlow."""

import numpy as np
import pytest

tfds = pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record.python.array_record_module")

EXAMPLES_A_FILE = 100


def prepare(root, splits: dict[str, int], name="tiny", version="1.0.0", images=None):
    """Writes a data set with that many examples in each split.

    images: features of another data set than text, and a function (split, number) -> example
    """
    folder = root / name / version
    folder.mkdir(parents=True)
    name, _, variant = name.partition("/")
    features = {"text": tfds.features.Text(), "title": np.int64}
    example = lambda split, i: {"text": f"{split} ö {i}", "title": i}  # noqa: E731
    if images is not None:
        features, example = images
    made = tfds.core.DatasetInfo(
        builder=tfds.core.dataset_info.DatasetIdentity(
            name=name,
            version=tfds.core.Version(version),
            data_dir=str(folder),
            module_name="",
            config_name=variant or None,
        ),
        features=tfds.features.FeaturesDict(features),
    )
    writer = tfds.core.SequentialWriter(made, EXAMPLES_A_FILE, file_format="array_record")
    writer.initialize_splits(list(splits))
    for split, count in splits.items():
        writer.add_examples({split: [example(split, i) for i in range(count)]})
    writer.close_all()
    return str(root)
