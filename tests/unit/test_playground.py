"""The playground's server, in this process: each action, and what it refuses."""

import base64
import concurrent.futures
import io
import json
import re
import socket
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from peer_folders import peer_folder
from PIL import Image
from playgrounds import (
    app,
    of_blocks,
    of_codes,
    of_edits,
    of_growing_text,
    of_images,
    of_text,
    served,
)  # fmt: skip
from starlette.testclient import TestClient

import md4_jax
from md4_jax import main
from md4_jax.data.pixels import PixelDomain
from md4_jax.protocols import UserError
from md4_jax.samplers.live_parts import LiveBlocks
from md4_jax.server import actions, serving
from md4_jax.server import app as app_module
from md4_jax.server.actions import Playground

LOCAL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def model():
    return of_text()


@pytest.fixture(scope="module")
def text(model):
    with TestClient(app(model), LOCAL, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def blocks():
    return of_blocks(8)


@pytest.fixture(scope="module")
def images():
    with TestClient(app(of_images()), LOCAL, raise_server_exceptions=False) as client:
        yield client


def sampled(client, **asked) -> list[dict]:
    answer = client.post("/api/sample", json={"steps": 8, **asked})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.campaign
def test_a_network_that_marks_the_ends_sees_them_where_the_text_ends(tmp_path):
    """The residues are those of `infill`, which draws on texts of that length."""
    model, text = md4_jax.load(peer_folder(tmp_path, "esm")), "M__A__I___V_"
    settings = {"sampler": "confidence", "steps": 4, "seed": 3, "grid": "cosine"}
    with TestClient(app(model), LOCAL) as client:
        messages = sampled(client, text=text, **settings)
        longer = sampled(client, text=text, continues=1, length=16, **settings)
    assert messages[0]["length"] == 12 and longer[0]["length"] == 16
    assert messages[-1]["text"] == model.infill(text, top_k=0, **settings).texts[0]
    # Which are others where the end is elsewhere.
    assert messages[-1]["text"] != model.infill(text, top_k=0, length=62, **settings).texts[0]


def final(messages: list[dict]) -> dict[int, int]:
    return {n: symbol for m in messages[:-1] for n, symbol, _ in m["changes"]}


def refused(client, path: str, **asked) -> str:
    answer = client.post(path, json=asked)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_facts(text, images):
    facts = text.get("/api/model").json()
    assert facts["kind"] == "text" and facts["unit"] == "characters" and facts["length"] == 32
    assert facts["lengths"] == [16, 32] and facts["labels"] == ["prose", "verse"]
    assert facts["guides"] and facts["costs"] and not facts["wide"]
    assert facts["samplers"]["any_order"] == {"order": ["random", "left_to_right", "right_to_left"]}
    facts = images.get("/api/model").json()
    assert facts["shape"] == [4, 4, 1] and facts["values"] == [0, 64, 128, 191, 255]
    assert facts["kind"] == "image" and not facts["costs"] and facts["lengths"] == [16]


def test_tokens(text):
    found = text.post("/api/tokens", json={"text": "a\n_<b"}).json()
    assert found == {"tokens": ["a", "↵", None, "<", "b"]}
    assert text.post("/api/tokens", json={}).json() == {"tokens": []}
    for said in ("é", "ab_cdé", "__é_é"):
        error = refused(text, "/api/tokens", text=said)
        assert f"the character 'é' at offset {said.index('é')} is not" in error


def test_hidden_words_are_filled_in_and_the_rest_stays(text, model):
    first, *rest, last = sampled(text, text="to be _r not", hidden=[0, 1], seed=4)
    assert first["step"] == 0 and first["of"] == 8 and first["length"] == 12
    assert first["prompt"] == [2, 3, 4, 5, *range(7, 12)]
    mask = model.domain.vocab_size
    assert [n for n, symbol, _ in first["changes"] if symbol == mask] == [0, 1, 6]
    assert first["words"][str(mask)] == "·"
    symbols = final([first, *rest, last])
    assert last["done"] and last["text"] == model.domain.decode([symbols[n] for n in range(12)])
    assert re.fullmatch(r".. be .r not", last["text"], re.S) and last["evaluations"] <= 8
    assert all(0 < p <= 1 for m in rest for _, symbol, p in m["changes"] if symbol != mask)
    steps = [m["step"] for m in rest]
    assert steps == sorted(set(steps)) and steps[-1] <= 8


@pytest.mark.slow
def test_a_sample_is_that_of_the_command_line(text, model):
    (*_, last) = sampled(text, seed=7, length=16, sampler="confidence", score="margin")
    drawn = model.sample(1, sampler="confidence", score="margin", seed=7, steps=8, length=16)
    assert last["text"] == drawn.texts[0]


def test_a_process_in_discrete_time_has_its_own_steps():
    discrete = dict(name="transition", kernel="uniform", timesteps=6)
    with TestClient(app(of_text(**discrete)), LOCAL, raise_server_exceptions=False) as client:
        facts = client.get("/api/model").json()
        assert (facts["steps"], facts["usual_steps"], facts["grids"]) == ([6], 6, ["uniform"])
        answer = client.post("/api/sample", json={"text": "to be", "continues": 1})
        first, *_, last = map(json.loads, answer.text.splitlines())
        assert first["of"] == 6 and last["text"].startswith("to be")
        assert "steps must be one of 6" in refused(client, "/api/sample", text="", steps=64)
        assert "grid must be one of uniform" in refused(client, "/api/sample", grid="cosine")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "key, network",
    [("dual_cache", dict(time_conditioning=False)), ("next_token", dict(shifted=True))],
)
def test_a_run_that_samples_in_blocks_is_drawn_as_a_whole(key, network):
    """Its section `sample` sets keys of blocks, which do not fit without `block`."""
    model = of_text(network | dict(local_width=0))
    model.config["sample"] |= {"block": 8, key: True}
    playground = Playground(model, "tiny")
    assert list(playground.states({"text": "to be", "steps": 4}))[-1]["done"]


def test_continuing_shows_what_comes_after_the_text(text):
    (first, *_, last) = sampled(text, text="to be", continues=1)
    assert first["length"] == 32 and len(last["text"]) == 32 and last["text"][:5] == "to be"


def test_states_of_blocks_come_while_they_are_drawn(blocks, monkeypatch):
    """Nothing is drawn while the request is checked: the clock runs, and who has gone waits not."""
    call, now = LiveBlocks._call, [0.0]

    def slow(*arguments):
        now[0] += 1.0
        return call(*arguments)

    monkeypatch.setattr(LiveBlocks, "_call", slow)
    monkeypatch.setattr(actions, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    playground = Playground(blocks, "tiny")
    messages = playground.states({"text": "to be", "steps": 2, "length": 16, "continues": 1})
    assert now == [0.0]
    first = next(messages)
    assert now == [2.0]  # the text is begun, and its first block
    *_, last = messages
    assert first["prompt"] == [0, 1, 2, 3, 4] and len(last["text"]) == 16
    assert last["seconds"] == 1 + 2 * 2


def test_blocks_after_the_text_are_not_drawn(blocks):
    """The characters of the text are the same, and the network is called for its block alone."""
    playground = Playground(blocks, "tiny")
    asked = {"text": "to be _", "steps": 2, "length": 16, "seed": 3}
    *_, whole = playground.states(asked | {"continues": 1})
    first, *_, last = playground.states(asked)
    assert last["text"] == whole["text"][:7] and first["length"] == 7
    assert 0 < last["evaluations"] < whole["evaluations"]


def test_a_draw_ends_when_its_reader_goes_away(blocks, monkeypatch):
    """A page that is stopped or closed cuts the connection: the model takes no more steps."""
    watch, steps, ended = blocks.watch, [], threading.Event()

    def watched(*arguments, **settings):
        try:
            for state in watch(*arguments, **settings):
                steps.append(state.step)
                yield state
                time.sleep(0.05)
        finally:
            ended.set()

    monkeypatch.setattr(blocks, "watch", watched)
    body = json.dumps({"steps": 1024, "length": 16, "sampler": "remask"})
    with served(blocks) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as page:
            head = (
                f"POST /api/sample HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            )
            page.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            said = b""
            while said.count(b'"step"') < 3:
                said += page.recv(2**16)
        assert ended.wait(30)
    assert 2 < len(steps) < 100


@pytest.mark.slow
def test_blocks_of_noise_that_are_not_begun_show_nothing():
    playground = Playground(of_blocks(8, "uniform"), "tiny")
    first, *_, last = playground.states({"steps": 2, "length": 16})
    assert [symbol for _, symbol, _ in first["changes"]][8:] == [-1] * 8
    assert first["words"][-1] == "" and len(last["text"]) == 16


@pytest.mark.slow
def test_lengths_are_those_that_the_model_can_draw():
    """Whole blocks, and no fewer tokens than the masks with which a text begins."""
    assert Playground(of_blocks(32), "tiny").facts["lengths"] == [32]
    assert Playground(of_blocks(8), "tiny").facts["lengths"] == [16, 32]
    assert Playground(of_edits(masks=17), "tiny").facts["lengths"] == [32]


@pytest.mark.slow
def test_a_text_that_grows_ends_before_the_positions_without_a_token():
    model = of_growing_text()
    absent = model.domain.vocab_size + 1
    with TestClient(app(model), LOCAL, raise_server_exceptions=False) as client:
        for asked in (dict(), dict(text="to be", continues=1)):
            messages = sampled(client, seed=3, **asked)
            symbols = final(messages)
            there = [symbols[n] for n in range(32) if symbols[n] != absent]
            assert 0 < len(there) < 32 and messages[0]["words"][str(absent)] == ""
            assert messages[-1]["text"] == model.domain.decode(there)
            assert messages[-1]["text"].startswith(asked.get("text", ""))
        assert sampled(client, text="to be")[-1]["text"] == "to be"
        assert "the beginning of a text" in refused(client, "/api/sample", text="to _e")


@pytest.mark.campaign
def test_settings_change_the_sample(text):
    def drawn(**asked):
        return sampled(text, **asked)[-1]["text"]

    usual = drawn()
    assert drawn() == usual
    for change in (dict(seed=1), dict(temperature=0.3), dict(sampler="remask", eta=0.9)):
        assert drawn(**change) != usual
    assert len({drawn(label=1, guidance=w, temperature=0.5) for w in (0.0, 20.0)}) == 2


@pytest.mark.slow
def test_remasking_takes_back(text, model):
    messages = sampled(text, sampler="remask", strategy="rescale", eta=1.0, steps=16)
    drawn, back = set(), 0
    for message in messages[:-1]:
        for n, symbol, _ in message["changes"]:
            if symbol == model.domain.vocab_size:
                back += n in drawn
            else:
                drawn.add(n)
    assert back > 0


def test_costs(text, model):
    found = text.post("/api/costs", json={"text": "to be", "label": 1}).json()
    expected = model.token_costs("to be", label=1)
    np.testing.assert_allclose(found["bits"], expected.bits, atol=1e-4)
    assert found["tokens"] == list("to be") and not found["exact"]
    np.testing.assert_allclose(found["total"], sum(found["bits"]), atol=1e-3)
    assert "has no likelihood" in refused(text, "/api/costs", text="")
    assert "each '_' is a hidden token" in refused(text, "/api/costs", text="a_b_")


@pytest.mark.parametrize("method", ["score", "token_costs"])
def test_labels_that_are_no_class_are_refused(method, model):
    """The network would read them as no label."""
    with pytest.raises(UserError, match=r"label=2 must be less than network\.classes=2"):
        getattr(model, method)("to be", label=2)


def encoded(values) -> str:
    return base64.b64encode(bytes(values)).decode()


@pytest.mark.slow
def test_an_image_is_filled_in_where_it_is_hidden(images):
    picture, hidden = [0, 255] * 8, [1] * 8 + [0] * 8
    messages = sampled(images, picture=encoded(picture), hidden=encoded(hidden))
    assert messages[0]["prompt"] == list(range(8, 16))
    symbols = final(messages)
    assert [symbols[n] for n in range(8, 16)] == [0, 4] * 4
    assert all(symbols[n] < 5 for n in range(16))
    from_noise = sampled(images, label=1, guidance=2)
    assert from_noise[0]["prompt"] == [] and len(final(from_noise)) == 16
    assert "this model has images" in refused(images, "/api/tokens", text="a")
    assert "picture must have 16 bytes, not 3" in refused(images, "/api/sample", picture="AAAA")
    assert "must be base64" in refused(images, "/api/sample", picture="/etc/passwd")


def shown(address: str) -> np.ndarray:
    """The image uint8 [H, W, 3] of an address that holds it."""
    kind, _, data = address.partition(",")
    assert kind == "data:image/jpeg;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def agree(address: str, image: np.ndarray) -> bool:
    """Whether it is the image but for the losses of a JPEG; other codes differ by far more."""
    return np.abs(shown(address).astype(int) - image).mean() < 8


@pytest.fixture(scope="module")
def coded():
    return of_codes()


@pytest.fixture(scope="module")
def codes(coded):
    with TestClient(app(coded), LOCAL, raise_server_exceptions=False) as client:
        yield client


def test_a_picture_becomes_codes(codes, coded, text):
    facts = codes.get("/api/model").json()
    assert facts["shape"] == [2, 3, 1] and facts["picture"] == [4, 6, 3] and facts["factor"] == 2
    assert facts["unit"] == "codes" and facts["coded"] and "values" not in facts
    picture = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    answer = codes.post("/api/codes", json={"picture": encoded(picture.ravel().tolist())}).json()
    expected = coded.domain.encode(picture)
    assert answer["codes"] == expected.tolist()
    assert agree(answer["picture"], coded.domain.decode(expected))
    assert not agree(answer["picture"], coded.domain.decode((expected + 1) % 24))
    assert "picture must have 72 bytes, not 3" in refused(codes, "/api/codes", picture="AAAA")
    assert "picture is missing" in refused(codes, "/api/codes")
    assert "no codes" in refused(text, "/api/codes", picture="AAAA")


def test_codes_are_filled_in_where_they_are_hidden(codes, coded):
    """Each change of the codes has its image, in which code 0 stands for a hidden one."""
    given = [3, 7, 1, 20, 23, 5]
    asked = {"codes": given, "hidden": encoded([0, 1, 0, 0, 1, 0]), "seed": 2}
    messages = sampled(codes, sampler="any_order", **asked)
    assert messages[0]["prompt"] == [0, 2, 3, 5]
    z = np.zeros(6, int)
    for message in messages[:-1]:
        for n, symbol, _ in message["changes"]:
            moved, z[n] = z[n] != symbol % 24, symbol % 24
            assert not moved or "picture" in message
        if "picture" in message:
            assert agree(message["picture"], coded.domain.decode(z))
    assert [z[n] for n in (0, 2, 3, 5)] == [3, 1, 20, 5]
    assert sum("picture" in message for message in messages) == 3  # both hidden, one, none
    for wrong in ([1] * 5, [24] + [1] * 5, [True] + [1] * 5, [0.5] * 6, "111111"):
        error = refused(codes, "/api/sample", codes=wrong)
        assert "codes must be 6 whole numbers below 24" in error
    assert "unknown field 'picture'" in refused(codes, "/api/sample", picture="AAAA")


def test_a_request_may_hold_a_picture_of_any_model(codes, coded):
    """Pixels and mask as base64, beside the 64 KiB of all requests."""
    large = SimpleNamespace(domain=PixelDomain((256, 256, 3)))
    whole = [len(base64.b64encode(bytes(n))) for n in (256 * 256 * 3, 256 * 256)]
    most = Playground.most_bytes.fget(SimpleNamespace(_domain=large.domain, _pictures=True))
    assert sum(whole) <= most < sum(whole) + 16
    answer = codes.post("/api/codes", json={"picture": "A" * (2**16 + 200)})
    assert answer.status_code == 413
    assert codes.post("/api/codes", json={"picture": "A" * 2**16}).status_code == 400


PATH = "../../../../etc/passwd"


@pytest.mark.parametrize(
    "key", ["sampler", "steps", "grid", "temperature", "top_p", "label", "guidance", "seed",
            "length", "hidden", "continues"],
)  # fmt: skip
def test_a_path_in_a_parameter_is_refused(key, text):
    asked = {key: PATH, **({"label": 0} if key == "guidance" else {})}
    assert re.match(rf"{key} must be ", refused(text, "/api/sample", **asked))


@pytest.mark.parametrize("sampler, key", [("remask", "strategy"), ("remask", "eta")])
def test_a_path_in_a_key_of_a_sampler_is_refused(sampler, key, text):
    said = refused(text, "/api/sample", sampler=sampler, **{key: PATH})
    assert re.match(rf"{key} must be ", said)


@pytest.mark.parametrize("key", ["templates", "inpaint", "image_from", "mask", "judge", "num"])
def test_keys_that_name_files_are_unknown(key, text, images):
    for client in (text, images):
        assert f"unknown field '{key}'" in refused(client, "/api/sample", **{key: PATH})


def test_a_path_as_text_is_text(text):
    (*_, last) = sampled(text, text=PATH)
    assert last["text"] == PATH


@pytest.mark.parametrize(
    "path", ["/../app.py", "/page/app.js", "/..%2f..%2fetc%2fpasswd", "//etc/passwd", "/api/",
             "/index.html", "/app.py", "/static/../../config.json", "/%2e%2e/serving.py"],
)  # fmt: skip
def test_only_the_files_of_the_page_can_be_read(path, text):
    answer = text.get(path)
    assert answer.status_code == 404 and answer.json() == {"error": "Not Found"}


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"hidden": [99]}, "a list of positions below 2"),
        ({"hidden": [True]}, "a list of positions"),
        ({"hidden": [-1]}, "a list of positions"),
        ({"steps": 7}, "steps must be one of 1, 2, 4"),
        ({"steps": True}, "steps must be one of"),
        ({"temperature": 1e999}, "temperature must be a number from 0 to 10, not inf"),
        ({"seed": 2**32}, "seed must be a whole number from 0 to 4294967295"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"text": 3}, "text must be text, not 3"),
        ({"text": "\ud800"}, "half of a surrogate pair"),
        ({"text": "a" * 33}, "the text has 33 characters, but the length is 32"),
        ({"text": "a" * 17, "length": 16}, "choose a greater length"),
        ({"label": 2}, "label must be a whole number from -1 to 1"),
        ({"sampler": "left_to_right"}, "sampler must be one of ancestral"),
        ({"sampler": ["remask"]}, "sampler must be one of ancestral"),
    ],
)
def test_what_does_not_fit_is_answered_with_a_sentence(asked, words, text):
    body = json.dumps({"text": "ab", **asked})
    answer = text.post("/api/sample", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and words in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 60_000, b"\xff", b"[1]", b'"a"', b"null"])
def test_a_body_that_is_no_request(body, text):
    answer = text.post("/api/sample", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]


@pytest.mark.parametrize(
    "kind, status",
    [("application/json; charset=utf-8", 200), ("Application/JSON", 200), ("text/plain", 415)],
)
def test_a_request_may_name_the_encoding_of_its_json(kind, status, text):
    answer = text.post("/api/tokens", content='{"text": "ab"}', headers={"content-type": kind})
    assert answer.status_code == status


def test_script_tags_are_characters(text):
    tags = "</script><img src=x onerror=f()>"
    (*_, last) = sampled(text, text=tags)
    assert last["text"] == tags
    answer = text.post("/api/tokens", json={"text": tags})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_large_requests_are_refused(text):
    large = {"text": "a" * 10_000_000}
    answer = text.post("/api/sample", json=large)
    assert answer.status_code == 413 and "64 KiB" in answer.json()["error"]

    def parts():  # without a length in advance
        yield from (b"a" * 2**15 for _ in range(300))

    kind = {"content-type": "application/json"}
    answer = text.post("/api/sample", content=parts(), headers=kind)
    assert answer.status_code == 413


def test_fifty_requests_at_once_are_answered_or_refused(text):
    def ask(seed):
        answer = text.post("/api/sample", json={"seed": seed, "steps": 8})
        return answer.status_code, answer.text.splitlines()[-1]

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(ask, range(50)))
    assert {code for code, _ in answers} <= {200, 503}
    done = [json.loads(line) for code, line in answers if code == 200]
    assert len(done) >= app_module.MOST_AT_ONCE and all(line["done"] for line in done)
    errors = {line for code, line in answers if code == 503}
    assert errors <= {json.dumps({"error": app_module.BUSY}, separators=(",", ":"))}
    assert sampled(text)[-1]["done"]  # no place is lost


def test_a_ninth_request_is_refused_while_eight_are_at_work(text, model, monkeypatch):
    begun, go = threading.Semaphore(0), threading.Event()

    def slow(*arguments, **settings):
        yield next(watch(steps=4))
        begun.release()
        go.wait(60)

    watch = model.watch
    monkeypatch.setattr(model, "watch", slow)
    server = text.app._app.routes[-1].endpoint.__self__
    with concurrent.futures.ThreadPoolExecutor(app_module.MOST_AT_ONCE + 1) as pool:
        asked = [pool.submit(sampled, text) for _ in range(app_module.MOST_AT_ONCE)]
        try:
            assert begun.acquire(timeout=60)
            wait_until(lambda: server._taken == app_module.MOST_AT_ONCE)
            ninth = pool.submit(text.post, "/api/costs", json={"text": "a"})
            refused = ninth.result(timeout=60)
            assert text.post("/api/tokens", json={"text": "a"}).status_code == 200
        finally:
            go.set()
        assert all(future.result()[-1]["done"] for future in asked)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "2"
    assert refused.json() == {"error": app_module.BUSY}


def wait_until(is_so) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_no_place_is_lost_by_errors(text, model, monkeypatch):
    def fails(*arguments, **settings):
        yield next(watch(steps=4))
        raise ValueError("a secret")

    watch = model.watch
    monkeypatch.setattr(model, "watch", fails)
    for _ in range(app_module.MOST_AT_ONCE + 1):
        first, last = sampled(text)
        assert last == {"error": app_module.FAILED} and first["step"] == 0
    monkeypatch.undo()
    for _ in range(app_module.MOST_AT_ONCE + 1):
        refused(text, "/api/costs", text="é")
        refused(text, "/api/sample", seed=-1)
    assert sampled(text)[-1]["done"]


@pytest.mark.parametrize(
    "host, allowed",
    [
        ("127.0.0.1:8000", True), ("localhost:8000", True), ("LOCALHOST", True), ("[::1]:80", True),
        ("192.168.0.7:8000", True), ("evil.example:8000", False), ("127.0.0.1.evil.example", False),
        ("", False), ("localhost.evil.example:8000", False), ("mine:8000", True),
    ],
)  # fmt: skip
def test_other_hosts_are_refused(host, allowed, model):
    """A name of an attacker that leads to this machine has another Host header."""
    client = TestClient(app(model, "mine"), LOCAL)
    for path in ("/", "/api/model"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == (200 if allowed else 421)
        assert allowed or answer.json()["error"].startswith("this server is not")


def test_requests_of_other_pages_are_refused(text):
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9000"):
        answer = text.post("/api/tokens", json={"text": "a"}, headers={"origin": origin})
        assert answer.status_code == 403
    own = text.post("/api/tokens", json={"text": "a"}, headers={"origin": LOCAL})
    assert own.status_code == 200
    plain = text.post("/api/tokens", content='{"text": "a"}')
    assert plain.status_code == 415
    assert text.get("/api/sample").status_code == 405


def test_pages_load_nothing_from_elsewhere(text):
    """Every answer has the policy; the files name no other host and never write HTML."""
    for path in ("/", "/app.js", "/app.css", "/trace.js", "/trace.css", "/none", "/api/model"):
        answer = text.get(path)
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script")
        assert answer.headers["cache-control"] == "no-store"
        if path.endswith(("s", "/")):
            assert not re.search(
                r"https?:|//www|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|"
                r"document\.write|\beval\b|style=|onclick",
                answer.text,
            )
    ids = set(re.findall(r'id="([\w-]+)"', text.get("/").text))
    used = set(re.findall(r'\bat\("([\w-]+)"\)', text.get("/app.js").text))
    assert used - ids <= {"of-sampler-1"}


def test_addresses():
    with serving.bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        # It listens before its address is printed: who connects at once waits, and is not refused.
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        with pytest.raises(UserError, match=f"--port {port} cannot be used.*--port 0 uses"):
            serving.bound("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot be used"):
        serving.bound("127.0.0.1", 99_999)
    assert [serving.is_local(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "box")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments, loaded",
    [
        (["--mode", "serve", "--workdir", "runs/a"], ("runs/a", "127.0.0.1", 8000)),
        (["serve", "hf:USER/NAME", "--port=0"], ("hf:USER/NAME", "127.0.0.1", 0)),
        (["serve", "--workdir=runs/a", "--host", "0.0.0.0"], ("runs/a", "0.0.0.0", 8000)),
    ],
)
def test_the_command_line(arguments, loaded, monkeypatch):
    asked = []
    monkeypatch.setattr(serving, "run", lambda load, *rest: asked.append((load, *rest)) or 0)
    assert main.run([*arguments, "--config.mesh.data=1"]) == 0
    ((load, *rest),) = asked
    assert tuple(rest) == loaded and load.args == (loaded[0], {"mesh.data": "1"})


@pytest.mark.parametrize(
    "arguments", [["serve"], ["serve", "a", "--workdir=b"], ["serve", "a", "--config=b"]]
)
def test_the_command_line_needs_one_model(arguments):
    with pytest.raises(UserError, match="--mode serve needs either --workdir RUN or --from"):
        main.run(arguments)


def test_the_server_starts_and_says_where(model, monkeypatch, capsys):
    import uvicorn

    def run(server, sockets):
        assert sockets[0].getsockname()[0] == "0.0.0.0"
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    assert serving.run(lambda: model, "tiny", "0.0.0.0", 0) == 0
    said = capsys.readouterr()
    assert re.match(r"playground of tiny: http://0\.0\.0\.0:\d+   \(Ctrl-C ends it\)\n$", said.out)
    assert "warning: --host 0.0.0.0 lets every machine" in said.err


def test_without_its_packages_the_server_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[serve\]'"):
        serving.run(lambda: None, "tiny", "127.0.0.1", 0)
