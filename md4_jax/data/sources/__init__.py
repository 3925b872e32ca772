"""Sources of data, one file each.

A source is a frozen dataclass whose fields are keys of the `data` section. It has
    fingerprint()      a text that changes with the data, the name of what is kept of it
    warnings           what the user should know, a tuple of sentences
    documents(split)   the texts of "train", "validation" or "test", one at a time
or, instead of documents, where examples are no text that could be joined and cut:
    domain()           what their symbols mean (data/domains.py)
    rows(split)        the examples themselves, data/sequences.py: Rows
"""
