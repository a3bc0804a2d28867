"""Damage of every kind that a folder of checkpoints, a file in it, a log or an argument can have,
drawn from a seed."""

import copy
import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

# become text that json.dumps would not write
DEEP, DIGITS, SURROGATE = "@deep@", "@digits@", "@surrogate@"
RAW = {
    f'"{DEEP}"': "[" * 20_000 + "]" * 20_000,
    f'"{DIGITS}"': "9" * 6000,
    f'"{SURROGATE}"': '"\\ud800"',
}
NUMBERS = [
    -1,
    0,
    1,
    2,
    7,
    2**31,
    2**63 - 1,
    2**63,
    10**18,
    10**30,
    10**400,
    1.5,
    -0.0,
    1e300,
    float("nan"),
    float("inf"),
]
TEXTS = [
    "",
    "x",
    "../x",
    "/etc/passwd",
    "rank_0/x.ckpt",
    "x" * 5000,
    "\x1b[31mred",
    "two\nlines",
    "[/b][bold]",
    "\u202eturned",
    "²",
    "٣",
    SURROGATE,
    DIGITS,
    DEEP,
]
STRANGE: list[Any] = [None, True, False, [], {}, [[]], *NUMBERS, *TEXTS]
NAMES = [
    b"\xff\xfe",
    b"\x1b]0;title\x07",
    b"a\nb",
    b"[bold]",
    b"[red]",
    b"\xe2\x80\xae",
    b"x" * 240,
    *b"""
    rank_1 rank_7 rank_007 rank_x iteration_00000030 iteration_7 net_rank_0-1_5.safetensors x-model-0000000-0000001.safetensors
    x-model-0000000-999999999999.safetensors x-opt-0000001-0000002.safetensors net_rank_0-999999999999_99999999999999999999.ckpt
    latest_checkpointed_iteration.txt metadata.json common.json meta.json common trial-x conversion.json tracker-0000000099
    step-0000000099-run-0009-0000ffff trash-step-0000000010-run-0001-0000aaaa claim-0009-0000ffff.json ended-0009-0000ffff.json
    manifest.json rank_00000.json emergency strategy_0123abcd used_for.json ckpt_strategy_rank_0.ckpt info.log info.log.999999
    config.json model.safetensors.index.json hyper_param.safetensors param_name_map.json""".split(),  # noqa: E501
    b"rank_" + b"9" * 200,
    b"net_rank_0\x1b-1_5.ckpt",
    b"weights\xff.safetensors",
    b"net\xff_rank_0-1_5.safetensors",
]


def dump(value: Any) -> bytes:
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(mark, raw)
    return text.encode()


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Yields the paths of all values in a document."""
    rows = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path] * bool(path) + [
        found for key, inner in rows for found in places(inner, (*path, key))
    ]


def strange(draw: random.Random) -> Any:
    """Draws a value. It is a copy, or a list drawn twice would get into itself."""
    return copy.deepcopy(draw.choice(STRANGE))


def altered(value: Any, draw: random.Random) -> Any:
    """Draws a document with another value, one less or one more, in one to three places."""
    for _ in range(draw.randint(1, 3)):
        found = places(value)
        if not found:
            return strange(draw)
        *path, key = draw.choice(found)
        target = value
        for step in path:
            target = target[step]
        how = draw.choice(["set", "set", "set", "delete", "wrap", "add"])
        if how == "delete":
            del target[key]
        elif how == "add" and isinstance(target, list):
            target.insert(key, strange(draw))
        elif how == "add":
            target[draw.choice([text for text in TEXTS if not text.startswith("@")])] = strange(
                draw
            )
        else:
            target[key] = [target[key]] if how == "wrap" else strange(draw)
    return value


# ---- contents ------------------------------------------------------------------------------------


def flip(content: bytes, draw: random.Random) -> bytes:
    out = bytearray(content or b"\0")
    for _ in range(draw.choice([1, 1, 3, 30])):
        out[draw.randrange(len(out))] = draw.randrange(256)
    return bytes(out)


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randint(0, len(content))]


def longer(content: bytes, draw: random.Random) -> bytes:
    return content + draw.choice([b"\0" * 100, b"\n", content, b"[" * 50_000, b"9" * 6000])


def other(content: bytes, draw: random.Random) -> bytes:
    return draw.choice(
        [
            b"",
            b"\0" * 4096,
            b"\xff" * 100,
            b"[" * 50_000 + b"]" * 50_000,
            b'{"a":' * 50_000,
            b"null",
            b"[]",
            b"{}",
            b"9" * 6000,
            b"NaN",
            b'"\\ud800"',
            draw.randbytes(200),
            b"20",
            b"-1",
            b"1 /x",
            b"\x80\x04cos\nsystem\n.",
        ]
    )


def document(content: bytes, draw: random.Random) -> bytes:
    """Returns JSON with other values in it; of a sealed file with right checksums; of safetensors
    the header."""
    if len(content) > 8 and content[8:9] == b"{":
        size = int.from_bytes(content[:8], "little")
        head = dump(altered(json.loads(content[8 : 8 + size]), draw))
        return len(head).to_bytes(8, "little") + head + content[8 + size :]
    lines = content.rstrip(b"\n").split(b"\n")
    if re.fullmatch(rb"[0-9a-f]{32}", lines[0]) and len(lines) in (2, 3):
        head, tail = json.loads(lines[1]), lines[2:]
        if tail and draw.random() < 0.5:
            tail = [dump(altered(json.loads(tail[0]), draw))]
            head["details"] = xxhash.xxh3_128_hexdigest(tail[0])
        else:
            head = altered(head, draw)
        line = dump(head)
        return b"\n".join([xxhash.xxh3_128_hexdigest(line).encode(), line, *tail]) + b"\n"
    return dump(altered(json.loads(content), draw))


def numbers(content: bytes, draw: random.Random) -> bytes:
    """Returns a text, such as a log, with other numbers in it."""
    found = list(re.finditer(rb"\d+(\.\d+)?", content))
    for match in sorted(draw.sample(found, min(len(found), 4)), key=lambda match: -match.start()):
        text = draw.choice(
            [
                b"",
                b".",
                b"-1",
                b"nan",
                b"inf",
                b"1e999",
                b"9" * 19,
                b"9" * 5000,
                b"9" * 60,
                b"99.99.99",
                b"0",
                "²".encode(),
            ]
        )
        content = content[: match.start()] + text + content[match.end() :]
    return content


def values(content: bytes, draw: random.Random) -> bytes:
    """Replaces eight bytes at the end, where safetensors stores small tensors such as counters."""
    number, real = (
        draw.choice([-1, 0, 1, 2**63 - 1, -(2**63), 10**18]),
        draw.choice([*NUMBERS[-2:], -1.0, 1e30]),
    )
    new = draw.choice(
        [struct.pack("<q", number), struct.pack("<d", real), struct.pack("<ff", real, real)]
    )
    at = max(len(content) - 8 * draw.randint(1, 8), 0)
    return content[:at] + new + content[at + 8 :]


CONTENTS = (
    flip,
    cut,
    longer,
    other,
    document,
    document,
    document,
    document,
    numbers,
    values,
    values,
)


# ---- folders -------------------------------------------------------------------------------------


def damage(root: Path, draw: random.Random) -> str:
    """Changes one thing below ``root``. Returns which."""
    paths = sorted(
        (path for path in root.rglob("*") if path.is_symlink() or path.exists()), key=os.fsencode
    )
    kinds: dict[str, list[Path]] = {}
    # or what there are most of would be struck most
    for path in paths:
        kinds.setdefault(re.sub(r"\d+", "0", path.name), []).append(path)
    if not kinds:
        return "nothing is left"
    path = draw.choice(kinds[draw.choice(list(kinds))])
    kind = draw.choice(["content"] * 6 + ["kind", "kind", "name", "name", "add", "remove"])
    return f"{kind} {CHANGES[kind](path, draw)} {os.fsencode(path.relative_to(root))!r}"


def change_content(path: Path, draw: random.Random) -> str:
    if not path.is_file():
        return "of no file"
    how = draw.choice(CONTENTS)
    content = path.read_bytes() if path.stat().st_size < 1 << 20 else b"large"
    try:
        content = how(content, draw)
    except (ValueError, RecursionError):
        content = flip(content, draw)
    path.unlink()  # it may be a link that leads elsewhere
    path.write_bytes(content)
    return how.__name__


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()


def change_kind(path: Path, draw: random.Random) -> str:
    how = draw.choice(["folder", "file", "pipe", "loop", "dangling", "zeros", "sparse", "parent"])
    clear(path)
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "sparse":
        path.touch()
        os.truncate(path, draw.choice([1 << 20, 1 << 40]))
    elif how == "file":
        path.write_bytes(b"x")
    else:
        path.symlink_to(
            {
                "loop": path,
                "dangling": path.parent / "nowhere",
                "zeros": "/dev/zero",
                "parent": "..",
            }[how]
        )
    return how


def change_name(path: Path, draw: random.Random) -> str:
    new = path.parent / os.fsdecode(draw.choice(NAMES))
    if new != path:
        clear(new)
        path.rename(new)
    return repr(new.name)


def add(path: Path, draw: random.Random) -> str:
    folder = path if path.is_dir() else path.parent
    new = folder / os.fsdecode(draw.choice(NAMES))
    if new == path or new in path.parents or new.is_dir():
        return "nothing"
    clear(new)
    if path.is_file() and draw.random() < 0.5:
        new.write_bytes(path.read_bytes() if path.stat().st_size < 1 << 20 else b"")
    elif draw.random() < 0.5:
        new.mkdir()
    else:
        new.write_bytes(other(b"", draw))
    return repr(new.name)


def remove(path: Path, draw: random.Random) -> str:
    clear(path)
    return ""


CHANGES: dict[str, Callable[[Path, random.Random], str]] = {
    "content": change_content,
    "kind": change_kind,
    "name": change_name,
    "add": add,
    "remove": remove,
}
