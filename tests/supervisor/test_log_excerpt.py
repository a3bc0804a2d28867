"""supervisor/log_excerpt.py: the lines of a log that say why its rank ended."""
from mindresume.supervisor.log_excerpt import MAX_LINES, TAIL_BYTES, error_lines, excerpt, tail

TRACEBACK = """step 5 loss 1.0
Traceback (most recent call last):
  File "run_mindformer.py", line 5, in main
    trainer.train()
    ^^^^^^^^^^^^^^^
mindresume.errors.SaveError: rank 3 could not write step 5
run_mindformer.py: failed on rank 3: SaveError: rank 3 could not write step 5
[INFO] exiting""".splitlines()


def test_the_end_of_a_traceback():
    assert error_lines(TRACEBACK) == (
        "Traceback (most recent call last):", "mindresume.errors.SaveError: rank 3 could not write step 5",
        "run_mindformer.py: failed on rank 3: SaveError: rank 3 could not write step 5", "[INFO] exiting")


def test_without_a_traceback_the_lines_with_a_word_for_an_error():
    lines = ["fine"] * 10 + ["[ERROR] HCCL link failed"] + ["fine"] * 3
    assert error_lines(lines) == ("[ERROR] HCCL link failed",)
    assert error_lines(["fine"]) == () == error_lines([])
    assert len(error_lines([f"error {number}" for number in range(100)])) == MAX_LINES


def test_of_a_log_of_any_size_the_end_is_read(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 33)                              # takes no space
        file.seek(0, 2)
        file.write(b"the end")
    assert len(tail(str(path))) == TAIL_BYTES and tail(str(path)).endswith("the end") and tail(str(tmp_path / "absent")) == ""


def test_a_log_that_is_absent_or_not_text(tmp_path):
    assert excerpt(str(tmp_path / "absent")) == ()
    (tmp_path / "log").write_bytes(b"\xff\0" * 1000 + b"\nRuntimeError: \xff bad\n")
    assert len(excerpt(str(tmp_path / "log"))) == 1
