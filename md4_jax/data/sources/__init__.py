"""Sources of data, one file each.

A source is a frozen dataclass whose fields are keys of the `data` section. It has
    fingerprint()      a text that changes with the data; cached tokens are found by it
    warnings           sentences for the user, a tuple
    documents(split)   the texts of "train", "validation", "test" or "all", one at a time
and optionally
    origin(split, number)  the place of a document, for messages
    label_key          not "" if texts have labels
    labelled(split)    the texts with their labels (Labelled of data/labelled.py)
A source of examples that are not text has, in place of documents:
    domain()           the meaning of their symbols (data/domains.py)
    rows(split)        the examples (Rows of data/sequences.py)
"""
