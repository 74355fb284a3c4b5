"""hsdp's own checkpoints, read without a pickle: the index, and the bytes of `extra.bin`."""

from __future__ import annotations

from hsdp.checkpoint import manifests
from hsdp.checkpoint.index import Index, from_json
from hsdp.checkpoint.remote import AnyPath
from hsdp.errors import CheckpointError


def read_own(path: AnyPath, manifest: manifests.Manifest) -> tuple[Index, bytes]:
    """The index of a checkpoint and the content of its `extra.bin`, both as the manifest has them.

    Raises:
        CheckpointError: a file is missing, damaged or contradicts the others; names it.
    """
    contents = []
    for name in (manifests.INDEX, manifests.EXTRA):
        if name not in manifest.files:
            raise CheckpointError(f"checkpoint {path}: {manifests.MANIFEST} does not list {name}")
        data = manifests.read_file(path / name)
        manifests.check_bytes(path, manifest, name, data)
        contents.append(data)
    try:
        index = from_json(contents[0])
    except CheckpointError as error:
        raise CheckpointError(f"{path / manifests.INDEX}: {error}") from None
    for name in index.files():
        if name not in manifest.files:
            raise CheckpointError(f"checkpoint {path}: {manifests.INDEX} says there are tensors in {name}, no file of it")
    return index, contents[1]
