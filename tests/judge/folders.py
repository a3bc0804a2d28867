"""Recipes of folders, and damage: each returns a change of the folder of a case, which says in one
line what it did."""

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from pathlib import Path

import xxhash

import mindresume
from tests.judge.case import Change, Train, changes, train
from tests.judge.normalise import json_of

FIXTURES = Path(__file__).resolve().parents[2] / "st" / "fixtures"
_MADE: dict[str, Path] = {}


# ---- folders -------------------------------------------------------------------------------------


def fixture(name: str, to: str = "output") -> Change:
    """Copies what mindformers wrote: checkpoints and strategy files."""

    def change(folder: Path) -> str:
        _copy(FIXTURES / name / "output", folder / to)
        return f"# {to}: {name}"

    return change


def part(source: str, to: str) -> Change:
    """Copies one folder or file of the fixtures."""

    def change(folder: Path) -> str:
        _copy(FIXTURES / source, folder / to)
        return f"# {to}: {source}"

    return change


def trained(name: str, to: str = "output", transcript: bool = False) -> Change:
    """Copies what a training of TRAININGS left in its folder ``output``. It is trained once.
    ``transcript``: tell how it went."""

    def change(folder: Path) -> str:
        base = _made(name, lambda base: _train(base, name))
        _copy(base / "output", folder / to)
        return f"# {to}: trained, {name}" + (
            "\n" + (base / "transcript").read_text() if transcript else ""
        )

    change.is_trained = True
    return change


def converted(
    name: str, format: str = "safetensors", step: int | None = None, to: str = "output/checkpoint"
) -> Change:
    """Copies what ``mindresume.convert`` made of a fixture: files of mindresume, in the same
    layout."""

    def make(base: Path) -> None:
        with chdir(base):
            mindresume.convert(
                FIXTURES / name / "output" / "checkpoint", "made", format=format, step=step
            )

    def change(folder: Path) -> str:
        _copy(_made(f"{name} {format} {step}", make) / "made", folder / to)
        return f"# {to}: {name}, converted to {format}" + (f", step {step}" if step else "")

    return change


def four(
    format: str = "safetensors", steps: tuple[int, ...] = (10, 15), to: str = "output/checkpoint"
) -> Change:
    """Copies a folder of mindresume with 4 ranks, dp=2, tp=2, and these steps: mindformers' files,
    converted step by step."""
    source = FIXTURES / "mf190_10_safetensors_dp2tp2" / "output" / "checkpoint"

    def make(base: Path) -> None:
        with chdir(base):
            for step in steps:
                mindresume.convert(source, f"{step}", format=format, step=step)
                _copy(base / f"{step}", base / "made")
                (base / "made" / "conversion.json").unlink()

    def change(folder: Path) -> str:
        _copy(_made(f"four {format} {steps}", make) / "made", folder / to)
        return (
            f"# {to}: of mindresume, {format}, 4 ranks (dp=2, tp=2), steps "
            f"{', '.join(map(str, steps))}"
        )

    return change


def hf_config(to: str = "Qwen3") -> Change:
    """Writes the config.json of the tiny Qwen3 of the fixtures."""
    return write(
        f"{to}/config.json",
        json.dumps(
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "num_hidden_layers": 2,
                "tie_word_embeddings": False,
                "vocab_size": 128,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "rope_theta": 10000.0,
                "torch_dtype": "float32",
            }
        ),
        "of the tiny Qwen3",
    )


def lease(
    to: str, purpose: str = "saving", run: str = "0007-0000abcd", **changes: object
) -> Change:
    """Writes the lease of a job on another host that sends no heartbeats, as docs/format.md
    describes it."""
    head = json.dumps(
        {
            "version": 1,
            "kind": "claim",
            "purpose": purpose,
            "run": run,
            "host": "node-7",
            "world_size": 4,
            "since": 1.7e9,
            "machine": "elsewhere",
            "pid": 4242,
            "started": 1,
            "folder": "",
            "holds": [],
            "beat": 1,
            "step": 20,
            "every": 0,
            **changes,
        }
    )
    return write(
        f"{to}/.mindresume/claim-{run}.json",
        f"{xxhash.xxh3_128_hexdigest(head.encode())}\n{head}\n",
        f"of a job on another host, {purpose}",
    )


def uploads(bucket: str, steps: tuple[int, ...] = (5, 10, 15), run: str = "") -> tuple[dict, ...]:
    """The steps after a save wait until it is in the bucket, so that none is skipped. ``run``: how
    the name of the run begins."""
    return tuple(
        {
            "step": step + 1,
            "do": "wait",
            "path": f"{bucket}/checkpoint/step-{step:010d}-{run}*/.mindresume/*/manifest.json",
        }
        for step in steps
    )


TRAININGS = {
    "1.0": Train(),
    "1.0 ckpt": Train({"monitor.checkpoint_format": "ckpt", "load_ckpt_format": "ckpt"}),
    "2.0": Train({"use_legacy_format": False}),
    "killed": Train({"mindresume.heartbeat": 3600}, actions=({"step": 17, "do": "kill"},)),
    "mindformers": Train({"resume_training": False, "load_checkpoint": ""}, plain=True),
    "mindformers 2.0": Train(
        {"resume_training": False, "load_checkpoint": "", "use_legacy_format": False}, plain=True
    ),
    "uploaded": Train(
        {"remote_save_url": "file://TMP/output/bucket"},
        actions=uploads("output/bucket"),
        ordered=False,
    ),
}


def _train(base: Path, name: str) -> None:
    rows = train(TRAININGS[name], base)
    if not any(row.startswith("trained ") for row in rows):
        log = base.parent / f"{base.name}.log"
        raise RuntimeError(f"{name}: {rows}\n{log.read_text()[-3000:]}")
    shutil.rmtree(base / "output" / "log")
    (base / "transcript").write_text(
        "\n".join([*rows, *changes(base, {}, hashed=False)]), encoding="utf-8"
    )


def _made(name: str, make: Callable[[Path], None]) -> Path:
    if name not in _MADE:
        base = Path(tempfile.mkdtemp(dir=_base()))
        make(base)
        _MADE[name] = base
    return _MADE[name]


def _base() -> str:
    if "" not in _MADE:
        _MADE[""] = Path(tempfile.mkdtemp(prefix="mindresume-judge-", dir=memory()))
    return str(_MADE[""])


def memory() -> str | None:
    """Returns a folder in memory for the folders of the cases, if there is room: the processes of
    trainings flush."""
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        if os.access("/dev/shm", os.W_OK) and found.f_bavail * found.f_frsize > 1 << 29:
            return "/dev/shm"
    return None


def remove_made() -> None:
    """Removes what the recipes keep."""
    base = _MADE.get("")
    _MADE.clear()
    if base:
        shutil.rmtree(base, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


# ---- damage --------------------------------------------------------------------------------------


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    found = sorted(glob.glob(str(folder / pattern), include_hidden=True, recursive=True))
    if not found:
        raise LookupError(f"{pattern}: there is no such file")
    yield from map(Path, found)


def _each(what: str, do: Callable[[Path], None]) -> Callable[[str], Change]:
    def of(pattern: str) -> Change:
        def change(folder: Path) -> str:
            for path in _files(folder, pattern):
                do(path)
            return f"# {what} {pattern}"

        return change

    return of


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(offset: int) -> Callable[[Path], None]:
    """Flips one bit and keeps the time of the file, as a disk that rots does."""

    def flip(path: Path) -> None:
        status, content = path.stat(), bytearray(path.read_bytes())
        content[offset] ^= 1
        with open(path, "r+b") as file:
            file.write(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return flip


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


truncate = _each("truncated:", _truncate)
flip = _each("a bit flipped near the end of", _flip(-3))
flip_header = _each("a bit flipped in the header of", _flip(40))
remove = _each("removed:", _remove)
empty = _each("emptied:", lambda path: os.truncate(path, 0))


def write(path: str, text: str, about: str = "") -> Change:
    def change(folder: Path) -> str:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
        return f"# written: {path}: {about or text.strip()}"

    return change


def folder_at(path: str) -> Change:
    def change(folder: Path) -> str:
        (folder / path).mkdir(parents=True)
        return f"# an empty folder: {path}"

    return change


def show(pattern: str) -> Change:
    """Shows the content of small files: JSON, also one document a line."""

    def change(folder: Path) -> str:
        rows = []
        for path in _files(folder, pattern):
            rows.append(f"$ cat {path.relative_to(folder)}")
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):
                    line = json_of(_rounded(json.loads(line)), folder)
                rows.append(line)
        return "\n".join(rows)

    return change


def _rounded(value: object) -> object:
    """Rounds losses, whose last digits are of this machine."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def copy(source: str, target: str) -> Change:
    """As ``cp -r`` does; of a pattern the first one."""

    def change(folder: Path) -> str:
        _copy(next(_files(folder, source)), folder / target)
        return f"# copied: {source} to {target}"

    return change


def move(source: str, target: str) -> Change:
    def change(folder: Path) -> str:
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        os.rename(next(_files(folder, source)), folder / target)
        return f"# moved: {source} to {target}"

    return change


def unname(step: int, root: str = "output/checkpoint") -> Change:
    """Moves an iteration folder back, as if the writer had been killed between the manifest and the
    rename."""

    def change(folder: Path) -> str:
        made = folder / root / f"iteration_{step:08d}"
        os.rename(made, folder / root / ".mindresume" / next((made / ".mindresume").iterdir()).name)
        (folder / root / ".mindresume" / f"tracker-{step:010d}").touch()
        (folder / root / "latest_checkpointed_iteration.txt").write_text(str(step - 5))
        return f"# as if killed between manifest and rename of step {step}"

    return change


def link(target: str, path: str) -> Change:
    """Makes ``path`` a symbolic link to ``target``."""

    def change(folder: Path) -> str:
        os.symlink(folder / target, folder / path)
        return f"# linked: {path} to {target}"

    return change


def edit(pattern: str, **changes: object) -> Change:
    """Changes keys of a JSON file."""

    def change(folder: Path) -> str:
        for path in _files(folder, pattern):
            path.write_text(
                json.dumps({**json.loads(path.read_text()), **changes}), encoding="utf-8"
            )
        return f"# edited: {pattern}: {changes}"

    return change


def touch_all(pattern: str, time: int) -> Change:
    """Sets the time of files."""

    def change(folder: Path) -> str:
        for path in _files(folder, pattern):
            os.utime(path, (time, time))
        return f"# times of {pattern} set to {time}"

    return change
