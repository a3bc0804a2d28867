"""supervisor/evidence.py: the lines of a log that say why its rank ended."""

from mindresume.supervisor.evidence import MAX_LINES, TAIL_BYTES, error_lines, excerpt, tail

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
        "Traceback (most recent call last):",
        "mindresume.errors.SaveError: rank 3 could not write step 5",
        "run_mindformer.py: failed on rank 3: SaveError: rank 3 could not write step 5",
        "[INFO] exiting",
    )


# What MindSpore 2.7.2 prints if a network cannot be compiled, with more frames.
RULER = "-" * 52
MINDSPORE = [
    "step 5 loss 1.0",
    "Traceback (most recent call last):",
    '  File "/x/mindspore/graph/api.py", line 2342, in compile',
    "    result = self._graph_executor.compile(",
    "             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    "RuntimeError: For 'MatMulExt' op, shape1[-1] must be equal to shape2[-2], but got 3 and 4.",
    "",
    RULER,
    "- C++ Call Stack: (For framework developers)",
    RULER,
    "mindspore/ops/infer/ops_func_impl//matmul_ext.cc:43 CheckMatMulShapes",
    "",
    RULER,
    "- The Traceback of Net Construct Code:",
    RULER,
    *(
        line
        for number in range(20)
        for line in (
            f"# {number} In file /x/llama.py:{number}, 15~31",
            "        return ops.matmul(x, y)",
            "               ^~~~~~~~~~",
        )
    ),
    " (See file '/x/rank_0/om/analyze_fail.ir' for more details.)",
    "Exception ignored in: <function Dataset.__del__>",
]


def test_an_error_of_mindspore_is_shown_without_its_call_stacks():
    assert error_lines(MINDSPORE) == (
        "Traceback (most recent call last):",
        MINDSPORE[5],
        MINDSPORE[-1],
    )


def test_a_message_of_many_lines_begins_with_its_error():
    lines = [
        "Traceback (most recent call last):",
        "LoadError: 40 tensors",
        *(f"tensor {number} failed" for number in range(40)),
    ]
    assert error_lines(lines)[0] == "LoadError: 40 tensors" and len(error_lines(lines)) == MAX_LINES


def test_without_a_traceback_the_lines_with_a_word_for_an_error():
    lines = ["fine"] * 10 + ["[ERROR] HCCL link failed"] + ["fine"] * 3
    assert error_lines(lines) == ("[ERROR] HCCL link failed",)
    assert error_lines(["fine"]) == () == error_lines([])
    assert len(error_lines([f"error {number}" for number in range(100)])) == MAX_LINES


def test_of_a_log_of_any_size_the_end_is_read(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # takes no space
        file.seek(0, 2)
        file.write(b"the end")
    assert (
        len(tail(str(path))) == TAIL_BYTES
        and tail(str(path)).endswith("the end")
        and tail(str(tmp_path / "absent")) == ""
    )


def test_a_log_that_is_absent_or_not_text(tmp_path):
    assert excerpt(str(tmp_path / "absent")) == ()
    (tmp_path / "log").write_bytes(b"\xff\0" * 1000 + b"\nRuntimeError: \xff bad\n")
    assert len(excerpt(str(tmp_path / "log"))) == 1
