"""Sources of data, one file each.

A source is a frozen dataclass whose fields are keys of the `data` section. It has
    fingerprint()      a text that changes with the data; it identifies cached tokens
    warnings           sentences for the user, a tuple
    documents(split)   the texts of "train", "validation", "test" or "all", one at a time
and optionally
    origin(split, number)  the place of a document, for messages
    label_key          not "" if texts have labels
    labelled(split)    the texts with their labels (Labelled of data/labelled.py)
    prompt_key         not "" if texts are answers to prompts
    pairs(split)       the pairs (prompt, answer)
    rejected_key       not "" if each pair also has a rejected answer
    rejected(split)    the rejected answers, in the same order
    messages_key       not "" if it holds conversations
    conversations(split)  for each an object with `messages` and the place `where`, and with
                       `rejected_messages` if there is a rejected_key; a chat template renders them
                       (data/conversations.py)
    A source of large text, with tokens in shards (data/prepare.py), also has
    title              name of the directory of shards
    is_large, has_documents  whether shards pay off, and whether splits consist of whole documents
    content()          a text that changes with the documents, not with the splits
    facts()            [name, SHA-256] of each file
    sections()         the files of each section of the corpus (Part of data/sources/formats.py)
    ranges(split, documents)  documents of a split: (section, first, last plus one)
A mixture (data/sources/mixture.py) has `parts`, sources of text with weights.
A source of examples that are not text has, instead of documents:
    domain()           the meaning of their symbols (data/domains.py)
    rows(split)        the examples (Rows of data/sequences.py)
Sources of images inherit these from ImageSource of data/images.py.
"""
