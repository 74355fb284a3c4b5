"""Hostile and damaged checkpoints, made at random from good ones by rules that know their structure.

A case takes a good checkpoint, changes one to three things in it (an opcode, a field, an entry, a header, some bytes), and
seals what hsdp seals, so that checksums do not stop it at the door. `checkpoint_fuzz.py` loads it.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import pickletools
import random
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from hsdp import checkpoint
from hsdp.checkpoint import CheckpointError, index, manifests, objects


class Net(nn.Module):
    """A little of everything: a matrix, a bias, a scalar, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.note: Any = {"a": [torch.ones(2), 3]}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


@dataclass
class Target:
    """What is loaded into, and how it was."""

    model: Net = field(default_factory=Net)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.optimizer.step()

    def content(self) -> bytes:
        """Everything, as bytes."""
        state = self.optimizer.state_dict()
        parts = [param.detach().numpy().tobytes() for param in self.model.parameters()]
        parts += [v.numpy().tobytes() for entries in state["state"].values() for v in entries.values()]
        return b"".join([*parts, repr(state["param_groups"]).encode(), repr(self.model.note).encode()])


# -- good ones ---------------------------------------------------------------------------------------------------------


def make_good(directory: Path) -> dict[str, Path]:
    """A checkpoint of each kind."""
    target = Target()
    good = {"own": checkpoint.save(directory / "own", target.model, target.optimizer, {"n": [1, (2,)]}, step=1).path}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = get_state_dict(target.model, target.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory / "dcp")
    good["dcp"] = directory / "dcp"
    plain = nn.Linear(3, 2)
    checkpoint.save_safetensors(directory / "tensors", plain, max_file_bytes=24)
    good["tensors"] = directory / "tensors"
    return good


def seal(path: Path) -> None:
    """Makes sizes and checksums of the manifest those of the files."""
    fields = json.loads((path / manifests.MANIFEST).read_text())
    for name in list(fields["files"]):
        if (path / name).is_file():
            data = (path / name).read_bytes()
            fields["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    write_manifest(path, fields)


def write_manifest(path: Path, fields: Any) -> None:
    if isinstance(fields, dict):
        fields.pop("crc32", None)
        fields["crc32"] = manifests._checksum(fields)
    (path / manifests.MANIFEST).write_text(json.dumps(fields))


# -- changes -----------------------------------------------------------------------------------------------------------

HOSTILE_GLOBALS = [
    "os.system",
    "builtins.eval",
    "pathlib.PosixPath",
    "subprocess.Popen",
    "torch.load",
    "torch.Size",
    "torch._dynamo",
    "collections.OrderedDict",
    "builtins.set",
    "builtins.bytearray",
    "hsdp.checkpoint.pickles._Machine",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
]


def hostile_snippet(rng: random.Random) -> bytes:
    """Opcodes that do harm to whoever runs them, and leave one value."""
    module, _, name = rng.choice(HOSTILE_GLOBALS).rpartition(".")
    asked = f"c{module}\n{name}\n".encode()
    text = b"X\x05\x00\x00\x00pwned"
    return rng.choice(
        [
            asked + text + b"\x85R",
            asked + b")\x81",
            asked + b"N}" + b"X\x04\x00\x00\x00name" + text + b"s\x86b",  # slots: setattr on a class
            asked + b"}X\x04\x00\x00\x00name" + text + b"sb",
            asked + b"(" + text + b"i" + asked[1:],
            b")" + b"\x85" * rng.choice([3, 99, 101, 5000, 300_000]),
            b"]" + b"\x94]h\x00a" * 20,
            b"K\x01" + b"\x94h\x00h\x00\x86" * rng.choice([10, 60]),
            b"\x8b\xff\xff\xff\x7f",
            b"\x8a\xff" + b"\xff" * 255,
            b"X\xff\xff\xff\xff",
            b"\x8d" + b"\xff" * 8,
            b"j\xff\xff\xff\xff",
            b"\x82\x01",
            b"P1\n",
            b"(dS'" + b"x" * 10 + b"'\n",
            b"J" + struct.pack("<i", rng.choice([-1, 0, 1, 2**31 - 1, -(2**31)])),
            b"\x8a\x08" + struct.pack("<q", rng.choice([-1, 2**62, 2**63 - 1, -(2**63)])),
            b"N",
            b"}",
            text,
        ]
    )


def change_pickle(rng: random.Random, data: bytes) -> bytes:
    """A pickle with opcodes left out, doubled, exchanged, or hostile ones put in."""
    try:
        starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:
        return change_bytes(rng, data)
    cuts = [*starts, len(data)]
    ops = [data[a:b] for a, b in itertools.pairwise(cuts)]
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(ops))
        what = rng.randrange(7)
        if what == 0:
            del ops[at]
        elif what == 1:
            ops.insert(at, ops[at])
        elif what == 2:
            other = rng.randrange(len(ops))
            ops[at], ops[other] = ops[other], ops[at]
        elif what == 3:
            ops.insert(at, hostile_snippet(rng))
        elif what == 4:
            ops[at] = hostile_snippet(rng)
        elif what == 5:
            ops[at] = change_operand(rng, ops[at])
        else:
            end = rng.randint(at, min(len(ops), at + 8))
            ops[at:end] = ops[at:end] * rng.randint(0, 3)
        ops = ops or [b"."]
    return b"".join(ops)


NAMES = [
    "../../../etc/hostname",
    "/etc/hostname",
    "..",
    "",
    "a/b",
    "\x00",
    "__0_0.distcp",
    ".metadata",
    "x" * 5000,
    "ü",
    "C:\\a",
]


def change_operand(rng: random.Random, op: bytes) -> bytes:
    """Another number, or another text of a length of its own."""
    code = op[:1]
    if size := {b"K": 1, b"M": 2, b"J": 4}.get(code):
        return code + rng.randbytes(size)
    if code == b"\x8c":
        text = rng.choice(NAMES).encode()[:255]
        return code + bytes([len(text)]) + text
    return code + change_bytes(rng, op[1:]) if len(op) > 1 else rng.choice([b"N", b"}", b"]", b")", b"0"])


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flipped, cut, doubled, random bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed)) if changed else 0
        what = rng.randrange(5)
        if what == 0 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            changed[at : at + rng.randint(1, 16)] = rng.randbytes(rng.randint(0, 16))
        elif what == 2:
            del changed[at:]
        elif what == 3:
            changed[at:at] = changed[at : at + rng.randint(1, 64)]
        else:
            changed[at : at + 8] = struct.pack("<q", rng.choice([-1, 0, 1, 2**31, 2**32 - 1, 2**62, -(2**63)]))
    return bytes(changed)


ODD: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**62, 2**63, 10**400, 1.5, float("nan"), "", "x", [], {}, [[]], [-1], [2**62,
    2**62], {"a": 1}, {"tuple": [1]}, {"tensor": ["torch.float32", [10**9], [0, 4], None]}, {"set": [[1]]}, {"dict":
    [[[], 1]]}, {"bytes": [0, 10**12]}, {"numpy array": ["O", [1], [0, 8]]}, {"numpy array": ["f8", [10**9], [0, 8]]},
    {"defaultdict": ["eval", []]}, {"range": ["a", 1, 1]}, {"os.system": "true"}, {"Path": "/etc"}, {"PosixPath": 3},
    {"torch.dtype": "load"}, {"torch.device": "cuda:99"}, {"datetime": "now"}, {"deque": [[1], -1]}, {"float":
    "1e999"}, {"complex": ["a", "b"]}, {"a": 1, "b": 2}, {"timedelta": [10**12, 0, 0]},
]  # fmt: skip


def change_json(rng: random.Random, tree: Any) -> Any:
    """A tree of JSON with a node replaced, left out, moved or nested deep."""
    nodes: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            nodes.append((value, key))
            walk(value[key])

    walk(tree)
    if not nodes:
        return rng.choice(ODD)
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(nodes)
        if (isinstance(holder, dict) and key not in holder) or (isinstance(holder, list) and key >= len(holder)):
            continue
        what = rng.randrange(7)
        value = holder[key]
        if what == 0:
            del holder[key]
        elif what == 1:
            holder[key] = rng.choice(NAMES)
        elif what == 2 and isinstance(holder, dict):
            holder[rng.choice(NAMES)] = holder.pop(key)
        elif what == 3 and isinstance(value, int):
            holder[key] = value + rng.choice([-1, 1, 7, 64, -(2**40), 2**40])
        elif what == 4:
            other, place = rng.choice(nodes)
            if (isinstance(other, dict) and place in other) or (isinstance(other, list) and place < len(other)):
                holder[key] = json.loads(json.dumps(other[place]))
        elif what == 5:
            nested: Any = value
            for _ in range(rng.choice([1, 50, 300])):
                nested = rng.choice([[nested], {"tuple": [nested]}]) if rng.random() < 0.9 else {"a": nested}
            holder[key] = nested
        else:
            holder[key] = rng.choice(ODD)
    return tree


def change_json_bytes(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.15:
        return rng.choice([b"[" * 100_000, b'{"a":' * 50_000, b"null", b"\xff", b"1e9999", change_bytes(rng, data)])
    return json.dumps(change_json(rng, json.loads(data))).encode("utf-8", "surrogatepass")


def change_headed(rng: random.Random, data: bytes) -> bytes:
    """`extra.bin` or a safetensors file: a length, a JSON header, and bytes."""
    (size,) = struct.unpack_from("<Q", data)
    header, rest = data[8 : 8 + size], data[8 + size :]
    what = rng.randrange(6)
    if what == 0:
        return struct.pack("<Q", rng.choice([0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1])) + header + rest
    if what == 1:
        return change_bytes(rng, data)
    header = change_json_bytes(rng, header)
    if rng.random() < 0.3:
        rest = change_bytes(rng, rest)
    return struct.pack("<Q", len(header)) + header + rest


def change_nested(rng: random.Random, data: bytes) -> bytes:
    """`extra.bin`, one of the packed values in it changed."""
    try:
        held = objects.unpack(data)
    except CheckpointError:
        return change_headed(rng, data)
    where = rng.choice(["extras", "values", "structures", "of_rank", "optimizer"])
    if where == "extras":
        held["extras"][0] = change_headed(rng, held["extras"][0])
    elif where in ("values", "structures"):
        key = rng.choice(list(held[where]))
        held[where][key] = change_headed(rng, held[where][key])
    else:
        held[where] = rng.choice([None, 7, "Adam", [], [9], ["x"], {}, [-1]])
    return objects.pack(held, "extra")


def change_zip(rng: random.Random, data: bytes) -> bytes:
    """A piece: its pickle changed, entries packed, renamed, doubled, left out or of other sizes; or its bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as found:
            entries = [(one.filename, found.read(one)) for one in found.infolist()]
    except Exception:
        return change_bytes(rng, data)
    what = rng.randrange(8)
    if what == 0:
        return change_bytes(rng, data)
    method = zipfile.ZIP_STORED
    place = rng.randrange(len(entries))
    name, content = entries[place]
    if what in (1, 2, 3):
        entries = [(n, change_pickle(rng, c) if n.endswith("data.pkl") else c) for n, c in entries]
    elif what == 4:
        method = zipfile.ZIP_DEFLATED
        entries[place] = (name, content + b"\0" * rng.choice([0, 1000, 5_000_000]))
    elif what == 5:
        entries[place] = (
            rng.choice([name.replace("data", "date"), "../" + name, "/etc/x", name + "/", "archive/data/0"]),
            content,
        )
    elif what == 6:
        del entries[place]
    else:
        entries[place] = (name, change_bytes(rng, content))
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w", method) as archive:
        warnings.simplefilter("ignore")
        for name, content in entries:
            archive.writestr(name, content)
    return made.getvalue()


def change_piece(rng: random.Random, path: Path) -> None:
    """One piece of the data file, in its own place: what is longer is cut off, what is shorter filled up."""
    file = path / "__0_0.distcp"
    data = file.read_bytes()
    if rng.random() < 0.2:
        file.write_bytes(change_bytes(rng, data))
        return
    described = index.from_dcp((path / ".metadata").read_bytes())
    place = rng.choice(described.places())
    piece = change_zip(rng, data[place.start : place.start + place.length])
    if len(piece) <= place.length and rng.random() < 0.8:
        end = piece.rfind(b"PK\x05\x06")
        piece = (
            piece[:end].ljust(place.length - (len(piece) - end), b"\0") + piece[end:]
            if end > 0
            else piece.ljust(place.length)
        )
        piece = piece[: place.length]
        file.write_bytes(data[: place.start] + piece + data[place.start + place.length :])
    else:  # at the end, and the metadata says so
        file.write_bytes(data + piece)
        text = pickle.loads((path / ".metadata").read_bytes())
        for info in text.storage_data.values():
            if info.offset == place.start:
                info.offset, info.length = len(data), len(piece)
        (path / ".metadata").write_bytes(pickle.dumps(text))
        if (path / manifests.INDEX).exists():
            own = json.loads((path / manifests.INDEX).read_text())
            packed = [*own["values"].values(), *(one for _, _, found in own["tensors"].values() for one in found)]
            for one in packed:
                if one[1] == place.start:
                    one[1:3] = [len(data), len(piece)]
            (path / manifests.INDEX).write_text(json.dumps(own))


def change_file(name: str, change: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, Path], object]:
    return lambda rng, path: (path / name).write_bytes(change(rng, (path / name).read_bytes()))


def change_manifest(rng: random.Random, path: Path) -> None:
    write_manifest(path, change_json(rng, json.loads((path / manifests.MANIFEST).read_text())))


def change_entries(rng: random.Random, path: Path) -> None:
    """A file left out, empty, a directory, or a link out of the directory."""
    victim = rng.choice(sorted(path.iterdir()))
    content = victim.read_bytes()
    victim.unlink()
    what = rng.randrange(4)
    if what == 1:
        victim.write_bytes(b"")
    elif what == 2:
        victim.mkdir()
    elif what == 3:
        victim.with_name(rng.choice(["a", "manifest.json", "step-000009", "index.json"])).write_bytes(content)


RULES: dict[str, list[tuple[str, Callable[[random.Random, Path], object], bool]]] = {
    "own": [
        ("manifest", change_manifest, False),
        ("index", change_file(manifests.INDEX, change_json_bytes), True),
        ("index bytes", change_file(manifests.INDEX, change_bytes), True),
        ("extra", change_file(manifests.EXTRA, change_headed), True),
        ("values", change_file(manifests.EXTRA, change_nested), True),
        ("pieces", change_piece, True),
        ("bytes", change_file("__0_0.distcp", change_bytes), False),
        ("entries", change_entries, False),
    ],
    "dcp": [
        ("metadata", change_file(".metadata", change_pickle), False),
        ("metadata bytes", change_file(".metadata", change_bytes), False),
        ("pieces", change_piece, False),
        ("entries", change_entries, False),
    ],
    "tensors": [
        ("header", change_file("model-00001-of-00002.safetensors", change_headed), False),
        ("tensors index", change_file("model.safetensors.index.json", change_json_bytes), False),
        ("entries", change_entries, False),
    ],
}


def make_case(seed: int, good: dict[str, Path], directory: Path) -> tuple[str, str]:
    """Writes the checkpoint of a case to `directory`; returns the kind of checkpoint and of change."""
    rng = random.Random(seed)
    kind = rng.choices(["own", "dcp", "tensors"], [5, 5, 2])[0]
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(good[kind], directory)
    name, change, sealed = rng.choice(RULES[kind])
    change(rng, directory)
    if sealed:
        seal(directory)
    return kind, name
