"""Public corpora and the hub, played by small stand-ins and a server of this machine."""

import functools
import hashlib
import io
import itertools
import json
import shutil
import tarfile
import time

import pyarrow
import pytest
from pyarrow import parquet

from md4_jax.data import hub, prepare
from md4_jax.data.packing import token_stream
from md4_jax.data.prepare import prepared, stream
from md4_jax.data.sources import corpora, formats
from md4_jax.data.sources.corpora import CORPORA, section_of
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.public import PublicText
from md4_jax.data.sources.splits import SPLITS
from md4_jax.data.tokenizers import Bytes
from md4_jax.protocols import UserError


def read(source) -> list[list[str]]:
    """The documents of each split, from the shards; those of `documents` are the same."""
    found = []
    for split in SPLITS:
        text = Bytes().decode(stream(source, Bytes(), split, "")[:])
        found.append(text.split("<|endoftext|>")[:-1])
        assert list(source.documents(split)) == found[-1]
    return found


def add(archive, name, raw):
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    archive.addfile(member, io.BytesIO(raw))


def openwebtext(path, count=60):
    """OpenWebText's layout: archives of texts in an archive, neither in the order of names."""
    texts = {f"{n:07}-{n:032x}.txt": f"page {n}\n\n\n\nand more\n" for n in range(count)}
    with tarfile.open(path, "w:xz") as outer:
        for first in reversed(range(0, count, 20)):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w:xz") as archive:
                for name in reversed(list(texts)[first : first + 20]):
                    add(archive, name, texts[name].encode())
            add(outer, f"openwebtext/urlsf_subset{first:02}-1_data.xz", inner.getvalue())
    return [f"page {n}\n\nand more" for n in range(count)]


def table(texts) -> bytes:
    made = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), made)
    return made.getvalue()


def test_openwebtext_in_the_cache_is_split_as_the_field_does(cache):
    cache.mkdir()
    expected = openwebtext(cache / "openwebtext.tar.xz")
    source = PublicText("openwebtext", test=7, validation=0.1)
    train, validation, test = read(source)
    assert train + validation + test == expected
    assert (len(validation), test) == (6, expected[-7:])
    with pytest.raises(UserError, match="test 100000 of 60 documents"):
        read(PublicText("openwebtext"))
    (warning,) = source.warnings
    assert "openwebtext.tar.xz (SHA-256" in warning and "is not the published file" in warning


def test_the_published_file_is_known_without_being_there(cache, monkeypatch):
    """Prepared once, it is found again when the archive is gone, and nothing is asked."""
    cache.mkdir()
    openwebtext(cache / "openwebtext.tar.xz")
    sha = hashlib.sha256((cache / "openwebtext.tar.xz").read_bytes()).hexdigest()
    file = CORPORA["openwebtext"].files[0]._replace(sha256=sha)
    recipe = CORPORA["openwebtext"]._replace(files=(file,), test=7)
    monkeypatch.setitem(corpora.CORPORA, "openwebtext", recipe)
    assert PublicText("openwebtext").warnings == ()
    made = prepared(PublicText("openwebtext"), Bytes(), "")
    (cache / "openwebtext.tar.xz").unlink()
    (folder,) = (path for path in cache.glob("openwebtext-*") if path.is_dir())
    shutil.rmtree(folder)
    assert prepared(PublicText("openwebtext"), Bytes(), "") == made


def test_an_archive_that_is_cut_is_not_taken_for_whole(cache):
    cache.mkdir()
    path = cache / "openwebtext.tar.xz"
    expected = openwebtext(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="openwebtext.tar.xz cannot be read.*Fetch it again"):
        prepared(PublicText("openwebtext", test=7), Bytes(), "")
    path.write_bytes(whole)
    found = read(PublicText("openwebtext", test=7))
    assert list(itertools.chain(*found)) == expected


def test_another_archive_of_the_same_name(cache):
    cache.mkdir()
    with tarfile.open(cache / "openwebtext.tar.xz", "w:xz") as archive:
        add(archive, "a.txt", b"text")
    with pytest.raises(UserError, match=r"contains no \*_data.xz: it is not the archive of"):
        prepared(PublicText("openwebtext"), Bytes(), "")


def test_lm1b(tmp_path):
    path = tmp_path / "lm1b.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for folder, files in (("training-monolingual", 3), ("heldout-monolingual", 2)):
            for n in range(files):
                texts = "".join(f"{folder} {n} {k} .\n" for k in range(10))
                add(archive, f"r13output/{folder}.tokenized.shuffled/news-{n}", texts.encode())
    train, validation, test = read(PublicText("lm1b", path=str(path), validation=4))
    assert (len(train), len(validation), len(test)) == (26, 4, 20)
    assert train[0] == "training-monolingual 0 0 ." and test[-1] == "heldout-monolingual 1 9 ."
    assert validation[0] == "training-monolingual 2 6 ."


def test_ptb_is_downloaded(cache, server, monkeypatch):
    files = []
    for name in ("train", "valid", "test"):
        server.files[f"/ptb.{name}.txt"] = f" words of {name} \n <unk> n \n".encode()
        files.append(corpora.File(f"{server.url}/ptb.{name}.txt"))
    monkeypatch.setitem(corpora.CORPORA, "ptb", CORPORA["ptb"]._replace(files=tuple(files)))
    found = read(PublicText("ptb"))
    assert found == [[f" words of {n} \n <unk> n \n"] for n in ("train", "valid", "test")]
    assert len(server.asked) == 3
    server.shutdown()
    assert read(PublicText("ptb")) == found


@pytest.fixture
def on_hub(server, monkeypatch):
    """Puts files of a data set on the hub that the server plays, two on a page."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def on_hub(dataset, folder, files, branch="main"):
        server.files[f"/api/datasets/{dataset}/revision/{branch}"] = b'{"sha": "abc123"}'
        entries = []
        for name, raw in files.items():
            server.files[f"/datasets/{dataset}/resolve/abc123/{name}"] = raw
            lfs = {"oid": hashlib.sha256(raw).hexdigest(), "size": len(raw)}
            entry = {"type": "file", "path": name, "size": len(raw)}
            entries.append(entry | ({"lfs": lfs} if name.endswith("parquet") else {}))
        tree = f"/api/datasets/{dataset}/tree/abc123/{folder}?recursive=true"
        server.files[tree] = json.dumps(entries[:2]).encode()
        server.links[tree] = f'<{server.url}{tree}&cursor=x>; rel="next"'
        server.files[f"{tree}&cursor=x"] = json.dumps(entries[2:]).encode()

    return on_hub


def test_wikitext_has_articles(on_hub, server):
    rows = ["", " = One = \n", "", " text of one \n", " = = Part = = \n", " more \n", " = Two = \n"]
    folder = "wikitext-2-raw-v1"
    names = [f"{folder}/{name}-00000-of-00001.parquet" for name in ("test", "train", "validation")]
    on_hub("Salesforce/wikitext", folder, {name: table([*rows, name]) for name in names})
    train, validation, test = read(PublicText("wikitext2"))
    one = " = One = \n text of one \n = = Part = = \n more \n"
    assert train == ["", one, f" = Two = \n{names[1]}"]
    assert validation[-1].endswith(names[2]) and test[-1].endswith(names[0])
    asked = len(server.asked)
    assert read(PublicText("wikitext2"))[0] == train and len(server.asked) == asked


def test_fineweb_edu_comes_file_by_file_and_need_not_stay(on_hub, server, cache, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 7)
    names = [f"sample/10BT/{n:03}_00000.parquet" for n in range(3)]
    texts = [f"page {n} of the web" for n in range(90)]
    files = {name: table(texts[30 * n : 30 * n + 30]) for n, name in enumerate(names)}
    on_hub("HuggingFaceFW/fineweb-edu", "sample/10BT", {**files, "sample/10BT/README.md": b"no"})
    source = PublicText("fineweb_edu", validation=5, test=5, keep_files=False)
    made = prepared(source, Bytes(), "")
    assert [name for name, _ in source.facts()] == [
        "000_00000.parquet",
        "001_00000.parquet",
        "002_00000.parquet",
    ]
    assert not list(cache.rglob("*.parquet"))
    asked = len(server.asked)
    again = PublicText("fineweb_edu", validation=5, test=5)
    assert prepared(again, Bytes(), "") == made and len(server.asked) == asked
    assert list(itertools.chain(*read(again))) == texts


@pytest.mark.parametrize(
    "number, needed", [(0, [0]), (3, [0]), (4, [0, 1]), (8, [1, 2]), (-1, [2])]
)
def test_a_damaged_shard_takes_no_file_that_it_does_not_need(
    number, needed, on_hub, server, cache, monkeypatch
):
    """Files of gigabytes came and went for a shard of the file before. Shards have 7 documents."""
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 7)
    names = [f"data/{n}.parquet" for n in range(3)]
    on_hub("some/set", "", {name: table([f"text of {name}"] * 30) for name in names})
    source = PublicText("some/set", validation=5, test=5, keep_files=False)
    made = prepared(source, Bytes(), "")
    (made.folder / made.shards[number].name).unlink()
    asked = len(server.asked)
    assert len(made.shards) == 13 and prepared(source, Bytes(), "") == made
    time.sleep(0.1)  # for a download beside it
    came = [path for path, _ in server.asked[asked:]]
    assert came == [f"/datasets/some/set/resolve/abc123/{names[n]}" for n in needed]
    assert not list(cache.rglob("*.parquet"))


def test_files_that_need_not_stay_come_once_where_there_are_no_shards(on_hub, server):
    """Conversations are read to be counted and in each split; files go only after shards."""
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    lines = (json.dumps({"talk": talk}) + "\n") * 10
    names = [f"data/{n}.jsonl" for n in range(2)]
    on_hub("some/set", "", dict.fromkeys(names, lines.encode()))
    keys = dict(messages_key="talk", validation=3, test=4, keep_files=False)
    source = PublicText("some/set", **keys)
    assert [len(list(source.conversations(split))) for split in SPLITS] == [13, 3, 4]
    asked = [path for path, _ in server.asked if path.endswith(".jsonl")]
    assert sorted(asked) == [f"/datasets/some/set/resolve/abc123/{name}" for name in names]


@pytest.mark.parametrize("sha256", ["", "ab" * 32])
def test_a_file_without_a_checksum_stays(sha256, cache):
    """Its content is what tells it from others, and must be there at the next start."""
    source, file = PublicText("some/set", keep_files=False), hub.HubFile("a.jsonl", "", 3, sha256)
    path = file.local("some/set")
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    source._discard(file)
    assert path.exists() == (not sha256)


def test_the_next_file_comes_while_one_is_read(on_hub, server, cache):
    names = [f"data/{n}.parquet" for n in range(3)]
    on_hub("some/set", "", {name: table([f"text of {name}"] * 5) for name in names})
    first, second, third = PublicText("some/set").sections()["train"]
    here = [cache / "hub" / "some" / "set" / name for name in names]
    assert not any(path.exists() for path in here)
    reading = first.documents(second)
    next(reading)
    until = time.monotonic() + 60
    while not here[1].exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert [path.exists() for path in here] == [True, True, False]
    asked = len(server.asked)
    texts = [
        document.text
        for document in itertools.chain(second.documents(third), third.documents(None))
    ]
    assert texts == [f"text of {name}" for name in names[1:] for _ in range(5)]
    assert [path for path, _ in server.asked[asked:]] == [
        f"/datasets/some/set/resolve/abc123/{names[2]}"
    ]


def test_a_file_that_cannot_come_early_is_named_when_it_is_read(on_hub, server):
    on_hub("some/set", "", {f"{n}.parquet": table([f"text {n}"]) for n in range(2)})
    del server.files["/datasets/some/set/resolve/abc123/1.parquet"]
    first, second = PublicText("some/set").sections()["train"]
    assert [document.text for document in first.read()] == ["text 0"]
    with pytest.raises(UserError, match="1.parquet could not be downloaded .*404"):
        next(second.read())


def test_any_data_set_of_the_hub(on_hub, server, monkeypatch):
    """With a split of its own, a folder, a login, and files that the hub has converted."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    lines = "".join(json.dumps({"body": f"line {n}"}) + "\n" for n in range(40)).encode()
    files = {"data/a/test.jsonl": lines[:170], "data/a/train.jsonl": lines}
    on_hub("some/set", "", {"script.py": b"no"})
    on_hub("some/set", "", files, branch="refs%2Fconvert%2Fparquet")
    found = read(PublicText("some/set", text_key="body", validation=0.1))
    assert [len(texts) for texts in found] == [36, 4, 9]
    assert server.headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("name", ["../../evil.txt", "data/../../../evil.txt", "{}/evil.txt"])
def test_a_server_cannot_write_outside_of_the_cache(name, on_hub, server, cache):
    on_hub("some/set", "", {name.format(cache.parent): b"evil"})
    with pytest.raises(UserError, match="which would be written outside of the cache directory"):
        list(PublicText("some/set").documents("train"))
    assert not [*cache.parent.glob("**/evil.txt")]


def test_a_folder_of_the_hub_with_a_space(on_hub, server):
    on_hub("some/set", "my%20data", {"my data/a.jsonl": b"{}"})
    (file,) = hub.files("some/set", "my data")
    assert file.url == f"{server.url}/datasets/some/set/resolve/abc123/my%20data/a.jsonl"


def test_folders_of_the_hub_have_listings_of_their_own(on_hub):
    for folder in ("a/b", "a_b", "a%5Fb", "a%2Fb"):
        on_hub("some/set", folder.replace("%", "%25"), {f"{folder}/0.txt": b""})
        assert [file.name for file in hub.files("some/set", folder)] == [f"{folder}/0.txt"]


@pytest.mark.parametrize("text", ["", "[[", "[[1]]", "[5]", "{}", "null"])
def test_a_damaged_listing_of_the_hub_is_asked_for_again(text, on_hub, server, cache):
    on_hub("some/set", "a/b", {"a/b/0.txt": b""})
    found = hub.files("some/set", "a/b")
    (kept,) = cache.rglob("*.listing.json")
    assert kept.name == "a_b.listing.json"
    kept.write_text(text)
    assert hub.files("some/set", "a/b") == found
    asked = len(server.asked)
    assert hub.files("some/set", "a/b") == found and len(server.asked) == asked


@pytest.mark.parametrize(
    "name",
    ["LICENSE.txt", "README.txt", "requirements.txt", "a/license-mit.txt", "Readme_en.txt.gz"],
)
def test_a_text_about_a_data_set_is_no_part_of_it(name, on_hub, cache):
    """Beside tables in other formats, of which the hub has made Parquet."""
    on_hub("some/set", "", {name: b"Permission is granted", "data/train.csv": b"text"})
    converted = {"default/train/0000.parquet": table(["row 0"])}
    on_hub("some/set", "", converted, branch="refs%2Fconvert%2Fparquet")
    assert [file.name for file in hub.files("some/set", "")] == list(converted)
    (kept,) = cache.rglob("*.listing.json")
    kept.write_text(json.dumps([(name, "", 0, "")]))  # an older version listed it
    assert [file.name for file in hub.files("some/set", "")] == list(converted)


def test_a_listing_that_an_older_version_kept_loses_texts_about_the_data_set(server, cache):
    """And keeps its data, with the addresses from which they came, so that runs go on."""
    kept = cache / "hub" / "some" / "set" / ".listing.json"
    kept.parent.mkdir(parents=True)
    data = [("a/train.jsonl", "one", 5, ""), ("test.txt", "two", 6, "")]
    for listed in (data, [("LICENSE.txt", "other", 4, ""), *data]):
        kept.write_text(json.dumps(listed))
        assert [tuple(file) for file in hub.files("some/set", "")] == data
    assert not server.asked


@pytest.mark.parametrize(
    "name",
    [
        *("licenses.txt", "readmetrain.txt", "readme/0.txt", "notices.txt", "Readme_1.txt"),
        *("notice_2020_0001.txt", "requirements_0001.txt", "changelog-linux-5.txt"),
        *("citation_0001.txt.gz", "notice_board.txt", "license_of_the_road.txt"),
    ],
)
def test_names_that_only_look_like_those_of_texts_about_a_data_set(name, on_hub):
    on_hub("some/set", "", {name: b"text"})
    assert [file.name for file in hub.files("some/set", "")] == [name]


def test_what_the_hub_refuses(on_hub, server):
    for code, words in ((401, "needs a login"), (403, "needs a login"), (404, "no such data set")):
        server.codes["/api/datasets/some/set/revision/main"] = code
        with pytest.raises(UserError, match=rf"some/set: .*{words}.*HTTP {code}.*HF_TOKEN"):
            prepared(PublicText("some/set"), Bytes(), "")
    server.files["/api/datasets/some/set/revision/main"] = b'{"sha": "abc123"}'
    with pytest.raises(UserError, match=r"no folder 'nowhere' \(data.folder\)"):
        prepared(PublicText("some/set", folder="nowhere"), Bytes(), "")
    on_hub("some/set", "", {"script.py": b"no"})
    with pytest.raises(UserError, match="some/set has no text files"):
        prepared(PublicText("some/set"), Bytes(), "")
    on_hub("some/set", "", {"a.parquet": table(["text"])})
    with pytest.raises(UserError, match=r"a.parquet: no key 'body' \(data.text_key\); it has id"):
        prepared(PublicText("some/set", text_key="body"), Bytes(), "")
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match="other/set: .* did not answer .*refused.*set data.path"):
        prepared(PublicText("other/set"), Bytes(), "")


def test_a_file_of_the_hub_with_a_wrong_checksum(on_hub, server):
    on_hub("some/set", "", {"a.parquet": table(["text"])})
    server.files["/datasets/some/set/resolve/abc123/a.parquet"] = table(["other"])
    with pytest.raises(UserError, match="a.parquet: the downloaded file has the SHA-256 .*repeat"):
        prepared(PublicText("some/set"), Bytes(), "")


@pytest.mark.parametrize("pattern", ["{}", "{}/", "{}/default/*/*.parquet", "{}/**/0.parquet"])
def test_the_folders_of_files_name_their_sections(pattern, tmp_path):
    """Those in the folder that data.path names, and none of the folders that it lies in."""
    root = tmp_path / "test"
    for section in ("train", "validation", "test"):
        (root / "default" / section).mkdir(parents=True)
        (root / "default" / section / "0.parquet").write_bytes(table([f"{section} 0"]))
    source = PublicText("some/set", path=pattern.format(root))
    assert read(source) == [["train 0"], ["validation 0"], ["test 0"]]
    alone = PublicText("some/set", path=str(root / "default/test/0.parquet"), test=0, validation=0)
    assert read(alone)[0] == ["test 0"]


def test_a_folder_that_is_a_clone_of_a_data_set(tmp_path):
    """What lies beside the data is read only where it is named."""
    texts = ("README.md", "LICENSE.txt", "set.py", "a/.cache.txt", "CITATION.txt.xz", "data.arrow")
    for name in (*texts, *hub.DESCRIPTIONS, "a/train.JSONL", "a/notice_1.txt", "b.csv.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "one"}\n')
    name = lambda path: [file for file, _ in PublicText("some/set", str(path)).facts()]  # noqa: E731
    assert name(tmp_path) == ["notice_1.txt", "train.JSONL", "b.csv.gz"]
    for named in ("README.md", "LICENSE.txt", "*.md", "state.json"):
        assert name(tmp_path / named) == [named.replace("*", "README")]
    assert "README.md" in [file for file, _ in PublicText("ptb", str(tmp_path)).facts()]


def test_a_folder_without_data_of_a_data_set(tmp_path):
    (tmp_path / "README.md").write_text("What it is")
    said = f"no file in the folder {tmp_path} or below .* To read README.md anyway, set"
    with pytest.raises(UserError, match=said):
        prepared(PublicText("some/set", str(tmp_path)), Bytes(), "")


def test_tables_in_a_folder_of_a_data_set_have_rows(tmp_path):
    """A list of objects, and cells; of the named corpora alone such a file is a text to be cut."""
    objects = [{"text": f"object {n}"} for n in range(3)]
    (tmp_path / "train.json").write_text(json.dumps(objects))
    (tmp_path / "validation.ndjson").write_text('{"text": "line 0"}\n{"text": "line 1"}\n')
    (tmp_path / "test.csv").write_text("label,text\n1,row 0\n2,row 1\n")
    found = read(PublicText("some/set", str(tmp_path)))
    assert found == [[f"object {n}" for n in range(3)], ["line 0", "line 1"], ["row 0", "row 1"]]


def test_conversations_in_a_list_of_a_data_set(tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "talks.json").write_text(json.dumps([{"talk": talk}]))
    source = PublicText("some/set", str(tmp_path), messages_key="talk", validation=0, test=0)
    (document,) = source.conversations("train")
    assert [one["content"] for one in document.messages] == ["Hi", "Hello"]


def test_tables_are_not_found_as_the_texts_of_before(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("text\nrow 0\n")
    source = PublicText("some/set", str(tmp_path), validation=0, test=0)
    content = source.content()
    monkeypatch.setattr(formats, "is_new_table", lambda path: False)
    assert source.content() != content


def test_files_in_folders_of_other_sections_are_other_texts(tmp_path):
    """Though names and contents are the same, so that no shards of the other are found."""
    sources = []
    for number, folders in enumerate((("test", "train"), ("one", "two"))):
        for k, folder in enumerate(folders):
            (tmp_path / str(number) / folder).mkdir(parents=True)
            (tmp_path / str(number) / folder / f"{k}.txt").write_text(f"text {k}")
        sources.append(PublicText("some/set", str(tmp_path / str(number)), validation=0, test=0))
    assert [len(read(source)[0]) for source in sources] == [1, 2]
    assert sources[0].facts() == sources[1].facts()
    assert sources[0].content() != sources[1].content()


@pytest.mark.parametrize("kind", ["public", "text"])
def test_other_amounts_are_other_splits_in_the_same_cache(kind, tmp_path):
    """Else a run would train on what the run before it held out."""
    texts = [f"text {n}" for n in range(30)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    make = functools.partial(PublicText, "some/set") if kind == "public" else TextFiles
    for validation, test in ((1, 2), (2, 2), (1, 3)):
        source = make(path=str(path), validation=validation, test=test)
        parts = [Bytes().decode(token_stream(source, Bytes(), split)) for split in SPLITS]
        found = [part.split("<|endoftext|>")[:-1] for part in parts]
        assert [len(part) for part in found] == [30 - validation - test, validation, test]
        assert list(itertools.chain(*found)) == texts


def test_an_unknown_corpus():
    with pytest.raises(UserError, match="'openwebtex' is not known. Known are openwebtext, lm1b"):
        PublicText("openwebtex")


@pytest.mark.parametrize(
    "name, section",
    [
        ("wikitext-2-raw-v1/validation-00000-of-00001.parquet", "validation"),
        ("ptb.valid.txt", "validation"),
        ("dev.jsonl", "validation"),
        ("x/heldout-monolingual/news", "test"),
        ("x/training-monolingual/news", "train"),
        ("data/test-0.parquet", "test"),
        ("latest/contest.txt", "train"),
        ("data/vala/train-00000-of-00001.parquet", "train"),
        ("data/dev_Latn/train/000.parquet", "train"),
        ("testimonials/train-0.jsonl", "train"),
        ("train/dev.jsonl", "validation"),
        ("values.jsonl", "train"),
        ("validation_00001.txt", "validation"),
        ("test2013.txt", "test"),
        ("testing/0.txt", "test"),
        ("my_devset.txt", "validation"),
    ],
)
def test_sections_by_name(name, section):
    assert section_of(name) == section
