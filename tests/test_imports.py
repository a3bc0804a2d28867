"""What a training needs before mindformers is there imports neither it nor mindspore. Which rooms
import them at all is a contract in pyproject.toml, which lint-imports checks."""

import subprocess
import sys

MODULES = (
    "saving.checkpoint_manager",
    "saving.save_session",
    "coordination.preemption",
    "resume.job_selection",
)


def test_the_flows_of_a_training_are_imported_without_mindformers():
    program = (
        f"import sys, {', '.join('mindresume.' + name for name in MODULES)}; "
        f"print(sorted({{name.split('.')[0] for name in sys.modules}} & {{'mindformers', "
        f"'mindspore'}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
