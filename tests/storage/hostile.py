"""Which files must be refused, and with which words? One small file a rule, built from nothing.

The archives come from the standard library's zipfile and the pickles from single opcodes, so
that nothing here rests on the code under test. ``python tests/storage/hostile.py`` writes them
to ``fixtures/hostile`` with a table of the rules; the tests compare both with this file.
"""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "fixtures" / "hostile"
CANARY = "canary"  # the file that a pickle of this module makes, if it runs
COMMAND = f"touch {CANARY}"

Records = Sequence[tuple[str, bytes]]


# Pickles, one opcode at a time.


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def several(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def whole(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def storage(kind: str = "FloatStorage", key: str = "0", numel: int = 6) -> bytes:
    place = (text("storage"), name("torch", kind), text(key), text("cpu"), number(numel))
    return several(*place) + b"Q"


def tensor(
    of: bytes | None = None,
    offset: int = 0,
    shape: Sequence[int] = (2, 3),
    strides: Sequence[int] = (3, 1),
    rest: bytes = b"",
) -> bytes:
    hooks = name("collections", "OrderedDict") + b")R"
    args = several(
        of or storage(),
        number(offset),
        several(*map(number, shape)),
        several(*map(number, strides)),
        b"\x89",
        hooks,
        rest,
    )
    return name("torch._utils", "_rebuild_tensor_v2") + args + b"R"


def key_bomb() -> bytes:
    """Return a tuple of tuples that share each other: 2**40 parts to hash, in 250 bytes."""
    doubling = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40))
    return b"}(K\x01q\x00" + doubling + b"Nu"


# Archives.


def archive(records: Records, method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as written:
        warnings.simplefilter("ignore")  # "Duplicate name" is the point of one of them
        for record, payload in records:
            info = zipfile.ZipInfo(record)
            info.compress_type = method
            written.writestr(info, payload)
    return file.getvalue()


def records(
    body: bytes | None = None, payload: bytes = bytes(24), extra: Records = ()
) -> list[tuple[str, bytes]]:
    pickled = whole(tensor()) if body is None else body
    return [("a/data.pkl", pickled), *extra, ("a/data/0", payload), ("a/version", b"3\n")]


def file_of(body: bytes) -> Callable[[], bytes]:
    return lambda: archive(records(whole(body)))


def raw(pickled: bytes) -> Callable[[], bytes]:
    return lambda: archive(records(pickled))


def renamed(old: str, new: str) -> Callable[[], bytes]:
    """Return an archive in which every mention of one name is another of the same length."""
    assert len(old) == len(new)
    return lambda: archive(records()).replace(old.encode(), new.encode())


def patched(place: Callable[[bytes], int], data: bytes) -> Callable[[], bytes]:
    def build() -> bytes:
        good = archive(records())
        at = place(good)
        return good[:at] + data + good[at + len(data) :]

    return build


def end_plus(offset: int) -> Callable[[bytes], int]:
    return lambda file: file.rindex(b"PK\5\6") + offset


def entry_plus(offset: int) -> Callable[[bytes], int]:
    return lambda file: file.index(b"PK\1\2") + offset


def local_plus(offset: int) -> Callable[[bytes], int]:
    return lambda _: offset


def encrypted() -> bytes:
    good = bytearray(archive(records()))
    for place in (local_plus(6), entry_plus(8)):
        good[place(bytes(good))] |= 1
    return bytes(good)


def overlapping() -> bytes:
    """Return an archive whose record data/1 lies inside the payload of data/0."""
    inner = archive([("a/data/1", bytes(8))])
    local = inner[: inner.index(b"PK\1\2")]
    good = archive([*records(payload=local), ("a/data/1", bytes(8))])
    inside = good.index(local)
    outside = good.rindex(b"PK\3\4", 0, good.index(b"PK\1\2"))
    pointer = good.rindex(struct.pack("<I", outside))
    return good[:pointer] + struct.pack("<I", inside) + good[pointer + 4 :]


def zip64_end(there: int, count: int, disks: int = 1) -> bytes:
    """Return a good archive with a zip64 end record of ``count`` entries put in."""
    good = archive(records())
    at = good.rindex(b"PK\5\6")
    length, offset = struct.unpack_from("<II", good, at + 12)
    end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, length, offset)
    locator = struct.pack("<IIQI", 0x07064B50, 0, at + there, disks)
    return good[:at] + end64 + locator + good[at:]


CONTAINERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "must be a zip archive, .* got first bytes none"),
    "legacy_pickle": (
        lambda: whole(name("os", "system") + text(COMMAND) + b"\x85R"),
        "must be a zip archive, .* got first bytes 8002636f",
    ),
    "cut_short": (lambda: archive(records())[:-5], "must end with a zip end record, got"),
    "bytes_behind": (lambda: archive(records()) + b"\0", "must end with a zip end record, got"),
    "comment": (
        lambda: patched(end_plus(20), b"\1\0")() + b"x",
        "must end with a zip end record, got",
    ),
    "comment_length": (patched(end_plus(20), b"\1\0"), "must have no comment, got 1 bytes"),
    "other_disk": (patched(end_plus(4), b"\1\0"), "must be one disk, got disk 1, 3 of 3 entries"),
    "entry_on_disk": (
        patched(entry_plus(34), b"\1\0"),
        "a/data.pkl: must have no comment and be on disk 0, got \\(0, 1\\)",
    ),
    "too_few_entries": (
        patched(end_plus(8), b"\2\0\2\0"),
        "directory must end after 2 entries, got 55 more bytes",
    ),
    "too_many_entries": (
        patched(end_plus(8), b"\xff\xff\xff\xff"),
        "directory of 165 bytes must hold its entries, got 65535",
    ),
    "directory_elsewhere": (
        patched(end_plus(16), b"\0\0\0\0"),
        "directory must end at 458, got 165 bytes at 0",
    ),
    "zip64_count": (lambda: zip64_end(0, 4), "both end records must agree, got 3 and 4"),
    "zip64_elsewhere": (
        lambda: zip64_end(8, 3),
        "zip64 end record must stand before its locator, got 466",
    ),
    "zip64_disks": (lambda: zip64_end(0, 3, 2), "must be one disk, got disk 0 of 2"),
    "torchscript": (
        lambda: archive(records(extra=[("a/constants.pkl", whole(b")"))])),
        "must be a torch.save file, got a TorchScript archive \\(constants.pkl\\)",
    ),
    "compressed": (
        lambda: archive(records(), zipfile.ZIP_DEFLATED),
        "a/data.pkl: record must be stored, not compressed, got method 8",
    ),
    "encrypted": (encrypted, "a/data.pkl: record must be stored plain, not encrypted, got flags"),
    "no_pickle": (
        renamed("a/data.pkl", "a/date.pkl"),
        "must have a record data.pkl, got \\['data/0', 'date.pkl', 'version'\\]",
    ),
    "pickle_rot": (
        lambda: archive(records()).replace(b"FloatStorage", b"FleatStorage"),
        "data.pkl: CRC-32 must be 0x[0-9a-f]{8}, got 0x[0-9a-f]{8}",
    ),
    "big_endian": (
        lambda: archive(records(extra=[("a/byteorder", b"big")])),
        "byteorder must be little, got b'big'",
    ),
    "duplicate": (
        lambda: archive(records(extra=[("a/data/0", bytes(24))])),
        "a record must stand once, got 'data/0' twice",
    ),
    "overlap": (overlapping, "data/1: must not overlap data/0, got 228"),
    "name_up": (
        renamed("a/version", "a/../sion"),
        "a record's name must be a plain path under one folder, got 'a/../sion'",
    ),
    "name_absolute": (
        renamed("a/version", "/etc/sion"),
        "a record's name must be a plain path under one folder, got '/etc/sion'",
    ),
    "name_backslash": (
        renamed("a/version", "a/ver\\ion"),
        "a record's name must be a plain path under one folder, got 'a/ver",
    ),
    "two_folders": (
        renamed("a/version", "b/version"),
        "records must share one top folder, got 'a' and 'b'",
    ),
    "local_name": (
        patched(local_plus(30), b"b"),
        "a/data.pkl: local header must have the same name, got b'b/data.pkl'",
    ),
    "local_method": (
        patched(local_plus(8), b"\x08"),
        "a/data.pkl: local header must have flags 0x0000, method 0, got \\(0, 8\\)",
    ),
    "local_size": (
        patched(local_plus(22), b"\0"),
        "a/data.pkl: local header must agree with the directory, got 0x0",
    ),
    "local_missing": (
        patched(local_plus(0), b"QK"),
        "must be a zip archive, .* got first bytes 514b0304",
    ),
}

TREES: dict[str, tuple[Callable[[], bytes], str]] = {
    "no_record": (
        file_of(tensor(storage(key="7"))),
        "storage '7' must have a record data/7, got none",
    ),
    "record_path": (
        file_of(tensor(storage(key="../version"))),
        "storage '../version' must have a record data/../version, got none",
    ),
    "short_record": (
        lambda: archive(records(payload=bytes(23))),
        "storage '0' of 6 float32 must have 24 bytes, got 23",
    ),
    "storage_class": (
        file_of(tensor(storage("EvilStorage"))),
        "a storage's class must be one of .*, got .*EvilStorage",
    ),
    "storage_twice": (
        file_of(several(storage(), storage("IntStorage"))),
        "storage '0' must always have the same class, place and size, got .* of 6 and .* of 6",
    ),
    "storage_size_bool": (
        file_of(
            several(text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), b"\x88")
            + b"Q"
        ),
        "a persistent id must be a storage's, got another",
    ),
    "other_id": (file_of(text("x") + b"Q"), "a persistent id must be a storage's, got another"),
    "view_beyond": (
        file_of(tensor(offset=1)),
        "a view must lie inside its 6 elements, got index 6",
    ),
    "view_before": (
        file_of(tensor(offset=-1)),
        "a tensor must have natural numbers as offset, sizes and strides, got",
    ),
    "view_backwards": (
        file_of(tensor(strides=(-3, 1))),
        "a tensor must have natural numbers as offset, sizes and strides, got",
    ),
    "view_rank": (
        file_of(tensor(strides=(1,))),
        "a tensor must have natural numbers as .*, got 2 sizes and 1 strides",
    ),
    "view_of_nothing": (
        file_of(tensor(of=b"N")),
        "a tensor must be made of a storage, .*, got NoneType, int",
    ),
    "lazy_conjugate": (
        file_of(tensor(rest=b"}" + text("conj") + b"\x88s")),
        "a tensor must have no lazy conjugate or negative, got one",
    ),
    "parameter_of_text": (
        file_of(name("torch._utils", "_rebuild_parameter") + text("x") + b"\x89N\x87R"),
        "a parameter must be made of a tensor and 2 arguments, got str, bool, NoneType",
    ),
    "storage_state": (
        file_of(storage() + b"N}" + text("numel") + b"K\x07s\x86b"),
        "state must be set once, on an object that has one, got a StorageRef",
    ),
    "dict_state": (
        file_of(b"}}b"),
        "state must be set once, on an object that has one, got a dict",
    ),
    "state_twice": (
        file_of(name("m", "C") + b")\x81}b}b"),
        "state must be set once, on an object that has one, got <inert 'm.C'>",
    ),
    "hidden_method": (
        file_of(name("collections", "OrderedDict") + b")R}" + text("items") + b"Nsb"),
        "an OrderedDict's attribute must not hide a method, got 'items'",
    ),
    "key_bomb": (
        file_of(key_bomb()),
        "a key must be a name, a number or a short tuple of them, got",
    ),
    "key_list": (file_of(b"}]Ns"), "a key must be a name, a number or a short tuple of them, got"),
    "set_on_list": (file_of(b"]NNs"), "items must be set on a dict, got a list"),
    "odd_items": (file_of(b"}(Nu"), "keys and values must pair up, got 1 objects"),
    "append_to_dict": (file_of(b"}Na"), "values must be appended to a list, got a dict"),
    "add_to_list": (raw(b"\x80\x04](N\x90."), "values must be added to a set, got a list"),
    "args_list": (file_of(name("m", "f") + b"]R"), "arguments must be a tuple, got a list"),
    "call_text": (file_of(text("f") + b")R"), "what is called must be a name, got 'f'"),
    "deep": (file_of(b"]" * 150 + b"a" * 149), "depth must be at most 100, got more"),
    "protocol_6": (raw(b"\x80\x06N."), "must start as protocol 2, 3, 4 or 5, got b'.x80.x06'"),
    "protocol_0": (raw(b"N."), "must start as protocol 2, 3, 4 or 5, got b'N.'"),
    "no_stop": (raw(b"\x80\x02N"), "must end with a STOP opcode, got the end of the data"),
    "stop_early": (raw(b"\x80\x02N.N"), "must end at its STOP opcode, got 1 more bytes"),
    "two_objects": (raw(b"\x80\x02NN."), "must leave one object, got 2 and 0 marks"),
    "open_mark": (raw(b"\x80\x02(N."), "must leave one object, got 1 and 1 marks"),
    "no_object": (raw(b"\x80\x02a."), "stack must hold what the opcode takes, got an empty one"),
    "no_mark": (raw(b"\x80\x02t."), "stack must hold a MARK, got none"),
    "no_memo": (raw(b"\x80\x02h\x07."), "must have stored what it fetches, got index 7"),
    "extension": (raw(b"\x80\x02\x82\x01."), "opcode must be one .*, got b'.x82'"),
    "instance": (raw(b"\x80\x02(ios\nsystem\n."), "opcode must be one .*, got b'i'"),
    "object": (raw(b"\x80\x02(" + name("os", "system") + b"o."), "opcode must be one .*, got b'o'"),
    "text_number": (raw(b"\x80\x02I1\n."), "opcode must be one .*, got b'I'"),
    "duplicate_top": (raw(b"\x80\x02N2."), "opcode must be one .*, got b'2'"),
    "huge_number": (raw(b"\x80\x02\x8b\1\0\0\0\1."), "opcode must be one .*, got b'.x8b'"),
    "buffer": (raw(b"\x80\x05\x97."), "opcode must be one .*, got b'.x97'"),
    "long_text": (
        raw(b"\x80\x02X\xff\xff\xff\xff."),
        "must hold 4294967295 more bytes, got 1",
    ),
    "long_frame": (
        raw(b"\x80\x04\x95\xff\xff\xff\xff\0\0\0\0N."),
        "a frame must hold 4294967295 bytes, got 2",
    ),
    "open_name": (raw(b"\x80\x02cos\nsystem."), "a name must end with a newline, got none"),
    "name_of_numbers": (raw(b"\x80\x04K\1K\1\x93."), "a name must be two texts, got 1"),
    "not_utf8": (raw(b"\x80\x02X\1\0\0\0\xff."), "text must be UTF-8, got b'.xff'"),
    "keywords_list": (
        raw(b"\x80\x04" + name("m", "C") + b")]\x92."),
        "keyword arguments must be a dict, got a list",
    ),
}

# Files that are read, and do nothing: what they would call stays a description of a call.
CALLS: dict[str, Callable[[], bytes]] = {
    "calls_system": file_of(name("os", "system") + text(COMMAND) + b"\x85R"),
    "calls_eval": file_of(
        name("builtins", "eval") + text(f"__import__('os').system('{COMMAND}')") + b"\x85R"
    ),
    "calls_getattr": file_of(
        name("builtins", "getattr")
        + name("builtins", "__import__")
        + text("os")
        + b"\x85R"
        + text("system")
        + b"\x86R"
        + text(COMMAND)
        + b"\x85R"
    ),
    "makes_popen": file_of(name("subprocess", "Popen") + text(COMMAND) + b"\x85\x81"),
    "builds_state": file_of(
        name("io", "BytesIO") + b")\x81}" + text("__class__") + name("os", "system") + b"sb"
    ),
    "allocates": file_of(
        name("numpy", "zeros") + number(0x7FFFFFFF) + number(0x7FFFFFFF) + b"\x86\x85R"
    ),
}


def files() -> Iterator[tuple[str, bytes]]:
    for table in (CONTAINERS, TREES):
        for label, (build, _) in table.items():
            yield f"{label}.pt", build()
    for label, make in CALLS.items():
        yield f"{label}.pt", make()


def readme() -> str:
    lines = [
        "# Hostile and damaged torch files",
        "",
        "One file a rule, written by `python tests/storage/hostile.py`. The message is a regular",
        "expression that the refusal's text must match. None of them may run anything: a file",
        f"that did would leave `{CANARY}` in the working directory.",
        "",
        "| File | Refused as | Message |",
        "|---|---|---|",
    ]
    for kind, table in (("container", CONTAINERS), ("pickle or tensor", TREES)):
        for label, (_, message) in table.items():
            lines.append(f"| `{label}.pt` | {kind} | `{message}` |")
    lines += [f"| `{label}.pt` | not refused, inert | |" for label in CALLS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file_name, data in files():
        (FOLDER / file_name).write_bytes(data)
    (FOLDER / "README.md").write_text(readme())
