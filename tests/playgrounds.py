"""Models of random parameters, of text and of images with classes, for the playground."""

import asyncio
import contextlib
import tempfile
import threading
import time

import autoencoder_folders
import jax

from md4_jax import autoencoders
from md4_jax.config import build, files
from md4_jax.data.codes import CodeDomain
from md4_jax.data.domains import TextDomain
from md4_jax.data.pixels import PixelDomain
from md4_jax.data.tokenizers import Characters
from md4_jax.model.model import Model
from md4_jax.runtime.paths import place
from md4_jax.server.actions import Playground
from md4_jax.server.app import application
from md4_jax.training.loop import fresh_state

ALPHABET = "".join(chr(c) for c in range(32, 127)) + "\n"
LABELS = ("prose", "verse")
LOSSES = {
    "masking": "block", "transition": "d3pm", "insertion": "flexmdm",
    "edits": "masked_edit_flow", "uniform": "uniform_elbo",
}  # fmt: skip


def model(domain, length: int, network=None, block: int = 0, **process) -> Model:
    """A model with two classes, whose parameters are as drawn; network: keys of that section."""
    config = files.load("quickstart")
    config["network"] |= dict(
        size=16, depth=1, heads=2, hidden=32, classes=len(LABELS), label_dropout=0.1,
        time_conditioning=True, tables=0,
    )  # fmt: skip
    config["network"] |= network or {}
    config["data"] |= dict(length=length)
    config["mesh"] |= dict(data=1)
    if process:
        config["process"], config["objective"] = process, {"name": LOSSES[process["name"]]}
    if block:
        config["objective"]["block"] = block
    if "timesteps" in process:
        config["sample"] |= dict(name="ancestral", steps=process["timesteps"], grid="uniform")
    if config["network"].get("gaps"):
        config["data"]["windows"] = "documents"
        config["sample"] |= dict(name="masked_edit" if "masks" in process else "insert")
    experiment = build.experiment(config, domain)
    params = fresh_state(experiment).ema
    # The head begins at zero, where nothing would change the samples.
    leaves, structure = jax.tree.flatten(params["network"])
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = (
        0.3 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)
    )
    changed = [x + n for x, n in zip(leaves, noise, strict=True)]
    params = params | {"network": jax.tree.unflatten(structure, changed)}
    return Model(experiment, params, 30, "", {"commit": "unknown", "results": {}})


def of_text(network=None, **rest) -> Model:
    """Text of 32 characters."""
    return model(TextDomain(Characters(ALPHABET), 32, LABELS), 32, network, **rest)


def of_blocks(block: int, name: str = "masking") -> Model:
    """Text of 32 characters that is drawn block by block, from masks or from noise."""
    own = {"parametrisation": "joint"} if name == "uniform" else {}
    network = dict(local_width=0, time_conditioning=name == "uniform")
    return of_text(network, block=block, name=name, schedule={"name": "linear"}, **own)


def of_growing_text() -> Model:
    """Text of up to 32 characters, to which characters are added anywhere."""
    schedules = {key: {"name": "linear"} for key in ("schedule", "insertion")}
    return of_text(dict(gaps=True), name="insertion", **schedules)


def of_edits(masks: int) -> Model:
    """Text of up to 32 characters, which begins with masks that are replaced or deleted."""
    schedule = {"name": "linear"}
    return of_text(dict(gaps=True, edits=True), name="edits", masks=masks, schedule=schedule)


def of_images() -> Model:
    """Grey images of 4 x 4 pixels with 5 levels."""
    return model(PixelDomain((4, 4, 1), 5, LABELS), 16)


def of_codes() -> Model:
    """Colour images of 4 x 6 pixels, as 2 x 3 codes out of 24 of a tiny published autoencoder."""
    folder = place(tempfile.mkdtemp()) / "vq"
    found = autoencoders.read(autoencoder_folders.write("vqgan_amused", folder))
    return model(CodeDomain((2, 3, 1), found.codes, found.sha256, LABELS, found), 6)


def app(found: Model, *hosts: str):
    """The application of a model."""
    return application(Playground(found, "tiny"), hosts)


@contextlib.contextmanager
def served(found: Model):
    """The address of a server in a thread of its own."""
    import uvicorn

    config = uvicorn.Config(app(found), port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < until and thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
