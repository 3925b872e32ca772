"""Text files, JSON lines and the corpus that ships with the package."""

import gzip
import io
import json
import os
import tarfile
import time
import zipfile

import pyarrow
import pytest
from pyarrow import parquet

from md4_jax.data import SOURCES, contents
from md4_jax.data.packing import token_stream
from md4_jax.data.sources import formats
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.shakespeare import Shakespeare
from md4_jax.data.sources.splits import SPLITS, bounds, digest
from md4_jax.data.tokenizers import Characters
from md4_jax.protocols import UserError


def read(source) -> list[list[str]]:
    return [list(source.documents(split)) for split in SPLITS]


def write_lines(path, texts, key="text"):
    lines = "".join(json.dumps({key: text}) + "\n" for text in texts)
    raw = lines.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def test_the_registry():
    texts = {name for name, source in SOURCES.items() if hasattr(source, "documents")}
    assert texts == {"text8", "text", "public", "tfds", "shakespeare", "mixture"}
    for name, source in SOURCES.items():
        wanted = ("fingerprint",) if name in texts else ("fingerprint", "domain", "rows")
        assert all(callable(getattr(source, name)) for name in wanted)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_documents_are_split_in_order(tmp_path, name):
    texts = [f"döc {i}\n" for i in range(100)]
    train, validation, test = read(TextFiles(write_lines(tmp_path / name, texts)))
    assert (len(train), len(validation), len(test)) == (90, 5, 5)
    assert train + validation + test == texts


def test_the_split_all_is_the_whole_text_uncut(tmp_path):
    """Whatever is held out, and also where nothing would be left to train on."""
    texts = [f"döc {i}\n" for i in range(30)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    assert list(TextFiles(path, validation=20, test=20).documents("all")) == texts
    (tmp_path / "one.txt").write_text("é" * 100)
    assert list(TextFiles(str(tmp_path / "one.txt")).documents("all")) == ["é" * 100]


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.txt"])
def test_a_link_back_does_not_repeat_the_text(tmp_path, pattern, monkeypatch):
    """glob follows it until a path is too long: the text was read 41 times."""
    for name in ("one/below", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "one" / "out").symlink_to("../other")
    (tmp_path / "one" / "itself").symlink_to("itself")
    expected = ["one/below", "other"]  # a link elsewhere is followed
    assert list(TextFiles(f"{tmp_path}/one{pattern}").documents("all")) == expected
    monkeypatch.chdir(tmp_path)
    for link, target in (("one/below/up", ".."), ("other/back", tmp_path / "one")):
        (tmp_path / link).symlink_to(target)
        said = rf"the link one\S*{link[-5:]} leads to {tmp_path}/one, which contains it"
        with pytest.raises(UserError, match=said):
            list(TextFiles(f"one{pattern}").documents("all"))
        (tmp_path / link).unlink()


FOLDERS = ["", "/**", "/*/*.txt", "/**/*.txt", "/secret"]


@pytest.mark.parametrize(
    "call, path",
    [*(("scandir", path) for path in FOLDERS), *(("stat", f) for f in [*FOLDERS, "/secret/a.txt"])],
)
def test_a_folder_that_cannot_be_read_is_not_left_out(call, path, tmp_path, monkeypatch):
    """One whose names cannot be listed, or whose files cannot be reached."""
    for folder in ("open", "secret"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("a text")
    own, secret = getattr(os, call), f"{tmp_path}/secret"

    def refuse(place, *arguments, **more):
        inside = str(place).removeprefix(secret) if str(place).startswith(secret) else None
        if inside is not None and (call == "scandir") == (inside in ("", "/")):
            raise PermissionError(13, "Permission denied", place)
        return own(place, *arguments, **more)

    monkeypatch.setattr(os, call, refuse)
    said = rf"^data\.path: .*{tmp_path}/secret\S* cannot be read: Permission denied"
    with pytest.raises(UserError, match=said):
        read(TextFiles(f"{tmp_path}{path}"))
    assert read(TextFiles(f"{tmp_path}/open"))  # which is not asked about its neighbour


def test_a_folder_of_the_system_is_left_out(tmp_path, monkeypatch):
    """At the root of a disk only the system may read some."""
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "lost+found").mkdir()
    own = os.scandir

    def scandir(place="."):
        if "lost+found" in str(place):
            raise PermissionError(13, "Permission denied", place)
        return own(place)

    monkeypatch.setattr(os, "scandir", scandir)
    assert read(TextFiles(str(tmp_path))) == read(TextFiles(f"{tmp_path}/*.txt"))


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a text")
    monkeypatch.setattr(os, "access", lambda file, mode: mode != os.R_OK)
    said = r"^data\.path: the file .*a\.txt cannot be read: Permission denied$"
    with pytest.raises(UserError, match=said):
        read(TextFiles(f"{tmp_path}/*.txt"))


def test_names_with_commas_between_them_are_several_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = r"""For several files .*'books/\*\.txt', or a list: .*path="\['a\.txt', 'b\.txt'\]"$"""
    with pytest.raises(UserError, match=said):
        read(TextFiles("a.txt,b.txt"))


def test_nothing_is_read_before_the_first_document_is_asked_for(tmp_path, monkeypatch):
    """A tokenizer that learns nothing from the text would else wait until all of it is counted."""
    path = write_lines(tmp_path / "a.jsonl", map(str, range(30)))
    monkeypatch.setattr(formats, "count", lambda *arguments: pytest.fail("a file was read"))
    source = TextFiles(path)
    source.documents("train"), source.labelled("train"), source.pairs("train")


def test_amounts_may_be_counts(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", map(str, range(100)))
    train, validation, test = read(TextFiles(path, validation=7, test=30))
    assert (train[-1], validation[0], test[0], test[-1]) == ("62", "63", "70", "99")
    train, validation, test = read(TextFiles(path, validation=0, test=0.001))
    assert (len(train), len(validation), len(test)) == (99, 0, 1)


def test_another_text_key_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + "".join(f'{{"body": "{i}"}}\n\n' for i in range(20)))
    train, validation, test = read(TextFiles(str(path), text_key="body"))
    assert train + validation + test == [str(i) for i in range(20)]
    assert (len(train), len(validation), len(test)) == (18, 1, 1)


@pytest.mark.parametrize("count, sizes", [(19, [252, 14, 14]), (20, [270, 10, 10])])
def test_twenty_documents_are_enough_to_be_left_whole(count, sizes, tmp_path):
    """One of 100 characters and others of 10."""
    path = write_lines(tmp_path / "a.jsonl", ["x" * 100, *["0123456789"] * (count - 1)])
    assert [len("".join(part)) for part in read(TextFiles(path))] == sizes


def test_few_documents_are_split_by_characters(tmp_path):
    (tmp_path / "b.txt").write_text("é" * 100)
    (tmp_path / "a.txt").write_text("x" * 100)
    train, validation, test = read(TextFiles(str(tmp_path), validation=0.05, test=20))
    assert train == ["x" * 100, "é" * 70]
    assert validation == ["é" * 10] and test == ["é" * 20]


def test_patterns(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("a.txt", "deep/b.txt", "deep/er/c.txt", "deep/er/d.md"):
        (tmp_path / name).write_text(name[-5] * 100)

    def letters(path):
        return "".join(doc[0] for doc in TextFiles(path, validation=0, test=0).documents("train"))

    assert letters(str(tmp_path / "*.txt")) == "a"
    assert letters(str(tmp_path / "**" / "*.txt")) == "abc"
    assert letters(str(tmp_path / "deep")) == "bc/"
    assert letters((str(tmp_path / "a.txt"), str(tmp_path / "deep" / "b*"))) == "ab"


def test_nothing_matches(tmp_path):
    for pattern in (str(tmp_path / "none"), str(tmp_path / "*.txt")):
        with pytest.raises(UserError, match=r"data\.path: no file matches") as caught:
            list(TextFiles(pattern).documents("train"))
        assert pattern in str(caught.value)
    with pytest.raises(UserError, match="'none' in /.*, where this command was started: start it"):
        list(TextFiles("none").documents("train"))
    with pytest.raises(UserError, match="'~/none'$"):  # which is not in the current directory
        list(TextFiles("~/none").documents("train"))
    with pytest.raises(UserError, match=f"no file in the folder {tmp_path} or below it$"):
        list(TextFiles(str(tmp_path)).documents("train"))


def test_the_mark_before_a_text_is_not_text(tmp_path):
    """Editors of Windows begin a file with U+FEFF; in the middle of a text it is a character."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "a\ufeffb".encode())
    write_lines(tmp_path / "b.jsonl", ["c\ufeff", "d"])
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "b.jsonl").read_bytes())
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("e.txt", b"\xef\xbb\xbfe")
    found = TextFiles(str(tmp_path), validation=0, test=0).documents("all")
    assert list(found) == ["a\ufeffb", "c\ufeff", "d", "e"]


def test_malformed_lines_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": broken}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: not JSON"):
        read(TextFiles(str(path)))
    path.write_text('{"title": "a", "body": "b"}\n')
    with pytest.raises(UserError, match=r"line 1: no key 'text' \(data\.text_key\); .*body, title"):
        read(TextFiles(str(path)))
    path.write_text('{"messages": []}\n')
    said = r"has messages: set data\.text_key, or data\.messages_key=messages, if these are conv"
    with pytest.raises(UserError, match=said):
        read(TextFiles(str(path)))
    path.write_text("[1]\n")
    with pytest.raises(UserError, match="line 1: not a JSON object but a list"):
        read(TextFiles(str(path)))
    path.write_text('{"text": 3}\n')
    with pytest.raises(UserError, match="line 1: 'text' must be text, not a number: 3$"):
        read(TextFiles(str(path)))


def test_undecodable_bytes_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xffdef")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8.*b'\\xff' at offset 3"):
        read(TextFiles(str(path)))
    lines = tmp_path / "b.jsonl"
    lines.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"offset 24"):
        read(TextFiles(str(lines)))


def archive(path, texts):
    """Writes texts as files of a zip, a tar, or of OpenWebText's archive of archives."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as made:
            for name, text in texts.items():
                made.writestr(name, text)
        return str(path)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:xz") as made:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            made.addfile(member, io.BytesIO(text.encode()))
    path.write_bytes(raw.getvalue())
    return str(path)


TEXTS = {f"{n:03}-döc.txt": f"text {n} é\n" for n in range(30)}


@pytest.mark.parametrize("name", ["a.zip", "a.tar.xz", "urlsf_subset00-1_data.xz"])
def test_the_files_of_an_archive_are_documents(name, tmp_path):
    path = archive(tmp_path / name, TEXTS)
    assert list(TextFiles(path).documents("all")) == list(TEXTS.values())
    assert TextFiles(path, test=3).origin("test", 1) == f"{path}, 028-döc.txt"


def test_the_archives_in_an_archive_are_read_in_the_order_of_names(tmp_path):
    inner = tmp_path / "openwebtext" / "urlsf_subset00-1_data.xz"
    inner.parent.mkdir()
    archive(inner, dict(reversed(TEXTS.items())))
    with tarfile.open(tmp_path / "outer.tar.xz", "w:xz") as made:
        made.add(inner, "openwebtext/urlsf_subset00-1_data.xz")
    found = TextFiles(str(tmp_path / "outer.tar.xz")).documents("all")
    assert list(found) == list(TEXTS.values())


@pytest.mark.parametrize("name", ["a.zip", "a.tar.xz", "a_data.xz", "a.parquet"])
def test_an_archive_that_is_cut_short(name, tmp_path):
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": list(TEXTS.values())}), path)
    else:
        archive(path, TEXTS)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        list(TextFiles(str(path)).documents("all"))


def test_the_rows_of_a_parquet_file_are_documents(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": list(TEXTS.values()), "n": list(range(30))}), path)
    source = TextFiles(str(path), test=2)
    assert list(source.documents("all")) == list(TEXTS.values())
    assert list(source.documents("test")) == list(TEXTS.values())[-2:]
    with pytest.raises(UserError, match=r"no key 'body' \(data.text_key\); it has n, text"):
        list(TextFiles(str(path), text_key="body").documents("all"))
    with pytest.raises(UserError, match="row 1: 'n' must be text, not a number: 0$"):
        list(TextFiles(str(path), text_key="n").documents("all"))


def test_a_parquet_file_of_another_name_is_told_from_text(tmp_path):
    path = tmp_path / "table.bin"
    path.write_bytes(b"PAR1 text and no more PAR1")
    with pytest.raises(UserError, match="table.bin is a Parquet file: rename it to table.bin"):
        read(TextFiles(str(path)))


TEXT_OF_RECORDS = [f'dö "c", {i}\r\nend' for i in range(30)]


def cells(separator: str) -> str:
    """The same records as a table, with quotes, separators and line ends in its cells."""
    quoted = ['"' + text.replace('"', '""') + '"' for text in TEXT_OF_RECORDS]
    rows = [f"{n}{separator}{text}" for n, text in enumerate(quoted)]
    return "\r\n".join([f"label{separator}text", *rows[:10], "", *rows[10:], ""])


@pytest.mark.parametrize(
    "name, written",
    [
        ("a.json", json.dumps([{"text": text, "n": 1} for text in TEXT_OF_RECORDS], indent=2)),
        ("b.json", "".join(json.dumps({"text": text}) + "\n" for text in TEXT_OF_RECORDS)),
        ("a.ndjson", "".join(json.dumps({"text": text}) + "\n" for text in TEXT_OF_RECORDS)),
        ("a.csv", cells(",")),
        ("a.TSV", cells("\t")),
        ("a.csv.gz", cells(",")),
    ],
    ids=lambda value: value if len(value) < 10 else "",
)
def test_records_of_other_files_are_documents(tmp_path, name, written):
    path = tmp_path / name
    raw = b"\xef\xbb\xbf" + written.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    source = TextFiles(str(path), validation=2, test=3)
    assert [text for split in read(source) for text in split] == TEXT_OF_RECORDS
    assert list(source.documents("test")) == TEXT_OF_RECORDS[-3:]
    (part,) = source.sections()["text"]
    positions = [document.position for document in part.read()]
    assert positions == sorted(positions)
    assert positions[-1] == part.size


def test_labels_and_prompts_of_a_table_of_cells(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,label,text\n" + "why,3,because\n" * 2 + "who,03,I\n")
    labels = [one.label for one in TextFiles(str(path), label_key="label", test=0).labelled("all")]
    assert labels == [3, 3, "03"]  # which is a name, as in JSON
    pairs = TextFiles(str(path), prompt_key="prompt", test=0).pairs("all")
    assert list(pairs) == [("why", "because")] * 2 + [("who", "I")]


@pytest.mark.parametrize(
    "name, written, said",
    [
        ("a.json", '[{"text": "a"}, {"txt": "b"}]', "record 2: no key 'text'.*it has txt"),
        ("a.json", '["a", "b"]', "record 1: not a JSON object but a str"),
        ("a.json", '{\n"version": 1,\n"data": [{"text": "a"}]\n}', "no key 'text'.*data, version"),
        ("a.json", '[{"text": "a"}, {"te', "a.json: not JSON"),
        ("a.json", "Once upon a time", "a.json, line 1: not JSON"),
        ("a.csv", "label;text\n1;a\n", "no key 'text' .*it has label;text"),
        ("a.csv", "label,text\n1,a,b\n", "line 2: the row has 3 cells, but the header has 2"),
        ("a.csv", 'text\nb\n"a\n', "line 3: the row cannot be split into cells"),
        ("a.csv", "text,text\na,b\n", "names the column 'text' twice"),
    ],
)
def test_a_file_that_is_no_records_says_how_to_read_it_as_text(tmp_path, name, written, said):
    path = tmp_path / name
    path.write_text(written)
    with pytest.raises(UserError, match=rf"(?s){said}.*ends in \.txt"):
        read(TextFiles(str(path)))


def test_tokens_that_were_once_those_of_the_plain_text_are_not_used(tmp_path):
    """A cache may hold those of an earlier version, under the fingerprint of the same file."""
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}]')
    source = TextFiles(str(path))
    plain = digest("text", contents.of_texts([path]), "text", 0.05, 0.05)
    assert source.fingerprint() != plain
    assert source.content() != digest("text", contents.of_texts([path]), "text")


def test_a_text_that_cannot_be_encoded_is_named(tmp_path):
    """The split, the file and the place in it."""
    path = write_lines(tmp_path / "a.jsonl", [*(["abc"] * 39), "abQ"])
    with pytest.raises(UserError, match=r"the test split, .*a.jsonl, line 40: .*'Q' at offset 2"):
        token_stream(TextFiles(path, test=2), Characters("abc"), "test")
    text = tmp_path / "b.txt"
    text.write_text("abc" * 30 + "aQ")
    source = TextFiles(str(text), validation=0, test=10)
    with pytest.raises(UserError, match=r"test split, .*b.txt, from character 82 on: .*offset 9"):
        token_stream(source, Characters("abc"), "test")
    assert len(token_stream(source, Characters("abc"), "train")) == 82


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83d b\\ud83d\\ude42"}\n' * 20)
    assert read(TextFiles(str(path)))[0][0] == "a\N{REPLACEMENT CHARACTER} b🙂"


def test_line_ends_of_windows_are_named_where_they_are_part_of_the_text(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"a\r\nb\r\n")
    (tmp_path / "a.csv").write_bytes(b"text\r\nb\r\n")
    (tmp_path / "c.txt").write_bytes(b"a\nb\n")
    warnings = TextFiles(str(tmp_path)).warnings
    assert len(warnings) == 1 and "b.txt has Windows line ends" in warnings[0]
    for name in ("a.csv", "c.txt"):
        assert TextFiles(str(tmp_path / name)).warnings == ()


def test_records_in_an_archive_are_not_read_as_text(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "a text")
        archive.writestr("data/train.CSV", "text\na\n")
    with pytest.raises(
        UserError, match="a.zip contains data/train.CSV, a file of records: unpack it"
    ):
        read(TextFiles(str(tmp_path / "a.zip")))


def test_without_a_key_every_file_is_a_text(tmp_path):
    """As a folder of source code is meant to be."""
    written = {
        "a.csv": "x,y\n1,2\n",
        "b.json": '{"name": 1}',
        "c.jsonl": "[1]\n",
        "d.py": "import this",
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    with zipfile.ZipFile(tmp_path / "e.zip", "w") as archive:
        archive.writestr("f.json", "[]")
    plain = TextFiles(str(tmp_path), text_key="", validation=0, test=0)
    assert read(plain)[0] == [*written.values(), "[]"]
    with pytest.raises(UserError, match=r"a.csv, line 2: no key 'text'.* or set data.text_key=''"):
        read(TextFiles(str(tmp_path)))
    for number in range(20):  # enough for splits of whole documents
        (tmp_path / f"{number}.csv").write_text("a\nb\n")
    assert list(TextFiles(str(tmp_path), text_key="", test=3).documents("test"))[-1] == "[]"
    with pytest.raises(UserError, match="data.label_key='y' needs data.text_key"):
        TextFiles(str(tmp_path), text_key="", label_key="y")
    (tmp_path / "g.parquet").write_bytes(b"PAR1 PAR1")
    with pytest.raises(
        UserError, match="data.text_key='' reads plain text, but .*g.parquet is a table"
    ):
        read(TextFiles(str(tmp_path), text_key=""))


def test_utf_16_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("größe".encode("utf-16"))
    with pytest.raises(UserError, match="a.txt is UTF-16 text: convert it to UTF-8"):
        read(TextFiles(str(tmp_path / "a.txt")))
    for kind, text in (("le", "quick"), ("be", "quick"), ("le", "schöne Größe")):  # without a mark
        (tmp_path / "b.txt").write_bytes(text.encode(f"utf-16-{kind}"))
        with pytest.raises(UserError, match="b.txt is UTF-16 text: convert it to UTF-8"):
            read(TextFiles(str(tmp_path / "b.txt")))
    for other in (b"a\0", b"\0" * 99, b"a few zeros\0\0 are left as they are\0"):
        (tmp_path / "b.txt").write_bytes(other)
        assert read(TextFiles(str(tmp_path / "b.txt"), validation=0, test=0))[0] == [other.decode()]


def test_a_damaged_gzip_file(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"hello" * 100)[:20])
    with pytest.raises(UserError, match=r"a\.txt\.gz cannot be read"):
        read(TextFiles(str(path)))


def test_nothing_left_to_train_on(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", map(str, range(30)))
    with pytest.raises(UserError, match=r"validation takes 2 and test 100000 of 30 documents"):
        list(TextFiles(path, test=100_000).documents("train"))
    with pytest.raises(UserError, match=r"data\.test is -1"):
        list(TextFiles(path, test=-1).documents("train"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"no characters: check data.path='.*empty.txt'"):
        list(TextFiles(str(tmp_path / "empty.txt")).documents("train"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{broken", "not JSON"),
        ('{"talk": "hello"}', "'talk' must be a conversation, which is a list of messages"),
        ('{"other": []}', r"no key 'talk' \(data\.messages_key\)"),
    ],
)
def test_a_malformed_line_of_few_is_named_before_their_number(line, why, tmp_path):
    """Two conversations leave nothing to train on, but one of them is a mistake."""
    good = json.dumps({"talk": [{"role": "user", "content": "a"}]})
    path = tmp_path / "chat.jsonl"
    path.write_text(f"{good}\n{line}\n")
    chat = TextFiles(str(path), messages_key="talk")
    with pytest.raises(UserError, match=rf"chat\.jsonl, line 2: {why}"):
        list(chat.conversations("train"))
    path.write_text(f"{good}\n{good}\n")
    with pytest.raises(UserError, match="of 2 documents: nothing is left to train on"):
        list(TextFiles(str(path), messages_key="talk").conversations("train"))


@pytest.mark.parametrize(
    "amount, words",
    [
        (-1, "data.test is -1; it must be 0 or more"),
        (1.5, "data.test is 1.5; below 1 it is a fraction, and from 1 on a whole number"),
    ],
)
def test_a_split_is_a_fraction_or_a_whole_number(amount, words):
    with pytest.raises(UserError, match=words):
        bounds(30, "test", validation=0.1, test=amount, unit="documents")
    assert bounds(30, "test", validation=0.1, test=2.0, unit="documents") == (28, 30)


def test_an_unknown_split(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(UserError, match="unknown split 'valid'; there are train, validation, test"):
        list(TextFiles(path).documents("valid"))


def test_the_fingerprint_follows_files_and_arguments(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", map(str, range(30)))
    before = TextFiles(path).fingerprint()
    assert TextFiles(path).fingerprint() == before
    assert TextFiles(path, test=7).fingerprint() != before
    write_lines(tmp_path / "a.jsonl", map(str, range(31)))
    assert TextFiles(path).fingerprint() != before


def test_a_text_replaced_by_one_of_its_size_and_time_is_another(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one text")
    before, at = TextFiles(str(path)).fingerprint(), path.stat()
    time.sleep(0.02)  # longer than a tick of the file system's clock
    path.write_text("another!")
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (at.st_size, at.st_mtime_ns)
    assert TextFiles(str(path)).fingerprint() != before


def test_the_same_text_written_again_is_the_same(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one text")
    before = TextFiles(str(path)).fingerprint()
    os.utime(path, (1, 1))
    assert TextFiles(str(path)).fingerprint() == before


def test_a_text_is_read_again_only_when_it_has_changed(tmp_path, cache, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one text")
    before = TextFiles(str(path)).fingerprint()
    monkeypatch.setattr(contents, "_content", None)
    assert TextFiles(str(path)).fingerprint() == before
    monkeypatch.undo()
    monkeypatch.setenv("MD4_JAX_CACHE", str(cache))
    (kept,) = (cache / "texts").iterdir()
    kept.write_text(kept.read_text()[:7])  # cut short, it is worked out again
    assert TextFiles(str(path)).fingerprint() == before


def test_bounds_cover_everything_once():
    for total in (20, 33, 1000):
        ranges = [bounds(total, s, validation=0.05, test=0.1, unit="documents") for s in SPLITS]
        assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))


def test_shakespeare_ships_with_the_package():
    parts = ["".join(documents) for documents in read(Shakespeare())]
    assert [len(part) for part in parts] == [1_003_854, 55_770, 55_770]
    assert parts[0].startswith("First Citizen:")
    assert Shakespeare().fingerprint() == Shakespeare().fingerprint()


def test_real_openwebtext(shared):
    path = shared("openwebtext/openwebtext-900.jsonl")
    train, validation, test = read(TextFiles(str(path), validation=50, test=100))
    assert (len(train), len(validation), len(test)) == (750, 50, 100)
    assert train[0].startswith("A magazine supplement")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.xz"])
def test_a_compressed_file_of_no_bytes_is_no_empty_text(name, tmp_path):
    """As a download that was cut off leaves it; gzip reads it as no text."""
    (tmp_path / name).touch()
    (tmp_path / "b.txt").write_text("a text")
    key = "" if "json" not in name else "text"
    with pytest.raises(UserError, match=f"{name} cannot be read: it has 0 bytes, .*Fetch it again"):
        list(TextFiles(str(tmp_path / name), text_key=key).documents("all"))
