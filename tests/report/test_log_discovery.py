"""Finds the files that are logs of a training, and orders their pieces."""

from pathlib import Path

from mindresume.report.log_parser import LogFile, find_logs


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def found(*folders):
    return [
        (log.rank, [Path(piece).name for piece in log.pieces])
        for log in find_logs(map(str, folders))
    ]


def test_rotated_files_are_one_log_the_oldest_first(tmp_path):
    put(
        tmp_path,
        *(f"log/rank_0/info.log{end}" for end in ("", ".1", ".2", ".10", ".gz")),
        "log/rank_0/error.log",
    )
    assert found(tmp_path) == [(0, ["info.log.10", "info.log.2", "info.log.1", "info.log"])]


def test_all_folders_with_a_suffix_and_all_ranks(tmp_path):
    put(
        tmp_path,
        "log/rank_1/info.log",
        "log_second/rank_0/info.log",
        "msrun_log_second/worker_0.log",
        "msrun_log/worker_12.log",
        "msrun_log/scheduler.log",
        "logs/rank_5/info.log",
        "checkpoint/rank_0/x.safetensors",
        "log/rank_x/info.log",
    )
    assert [(rank, names[0]) for rank, names in found(tmp_path)] == [
        (0, "info.log"),
        (0, "worker_0.log"),
        (1, "info.log"),
        (12, "worker_12.log"),
    ]


def test_a_folder_of_logs_itself_and_nothing_twice(tmp_path):
    put(tmp_path, "elsewhere/rank_0/info.log", "log/rank_0/info.log", "elsewhere/worker_0.log")
    assert len(found(tmp_path, tmp_path / "elsewhere", tmp_path / "log", tmp_path)) == 3


def test_an_empty_folder_has_no_logs(tmp_path):
    put(tmp_path, "log")
    assert found(tmp_path, tmp_path / "gone") == []
    assert find_logs([]) == ()
    assert LogFile(0, ()) != LogFile(1, ())
