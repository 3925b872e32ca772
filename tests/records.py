"""A real TFDS data set, written in array_record without TensorFlow."""

import numpy as np
import pytest

tfds = pytest.importorskip("tensorflow_datasets")
array_record = pytest.importorskip("array_record.python.array_record_module")

NAMES = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


def prepare(root, splits: dict[str, int], name="tiny", version="1.0.0", images=None):
    """Writes a data set with that many examples in each split.

    images: features of another data set than text, and a function (split, number) -> example
    """
    folder = root / name / version
    folder.mkdir(parents=True)
    features = {"text": tfds.features.Text(), "title": np.int64}
    example = lambda split, i: {"text": f"{split} ö {i}", "title": i}  # noqa: E731
    if images is not None:
        features, example = images
    features = tfds.features.FeaturesDict(features)
    infos = []
    for split, count in splits.items():
        path = folder / f"{name}-{split}.array_record-00000-of-00001"
        records = [features.serialize_example(example(split, i)) for i in range(count)]
        writer = array_record.ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
        infos.append(
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[count],
                num_bytes=sum(map(len, records)),
                filename_template=None,
            )
        )
    tfds.folder_dataset.write_metadata(
        data_dir=str(folder),
        features=features,
        split_infos=infos,
        filename_template=NAMES,
        check_data=False,
    )
    return str(root)
