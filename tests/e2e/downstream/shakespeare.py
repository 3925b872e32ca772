"""Documents of the tasks in this folder."""

from datasets import Dataset

PAIRS = (
    ("First Citi", ["zen", "xqj"], 0),
    ("We are ", ["qzx", "all"], 1),
    ("Speak, ", ["speak", "kzzqx"], 0),
    ("the gods ", ["xjxjx", "know"], 1),
)


def choices(**_) -> dict[str, Dataset]:
    rows = [{"context": c, "choices": words, "answer": a} for c, words, a in PAIRS]
    return {"test": Dataset.from_list(rows)}


def lines(**_) -> dict[str, Dataset]:
    rows = [{"context": c, "rest": words[answer]} for c, words, answer in PAIRS]
    return {"test": Dataset.from_list(rows)}
