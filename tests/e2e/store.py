"""An object store on this machine that speaks as Google Cloud Storage does: store.py PORT BUCKET.

Objects are files below $STORAGE_BASE/$STORAGE_DIR/BUCKET.
"""

import sys

from gcp_storage_emulator.handlers import objects

_download = objects.download


def download(request, response, storage, *args, **kwargs) -> None:
    """The emulator's, with the generation of the object, which TensorStore asks for."""
    _download(request, response, storage, *args, **kwargs)
    name = request.params["bucket_name"], request.params["object_id"]
    if response.status < 400:
        response["x-goog-generation"] = storage.get_file_obj(*name)["generation"]


objects.download = download  # before the server takes its table of handlers

from gcp_storage_emulator.server import create_server  # noqa: E402

if __name__ == "__main__":
    port, bucket = sys.argv[1:]
    create_server("127.0.0.1", int(port), in_memory=False, default_bucket=bucket).run()
