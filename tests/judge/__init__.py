"""The judge: what a user of mindresume can see, held while everything inside is renamed, moved or
deleted.

Each case (``stories/``) makes a folder (``folders.py``), damages it by plain operations on files,
and does what a user does: commands of ``mindresume``, calls of ``import mindresume``, trainings
with ``mindresume.plugin`` in the real Trainer of mindformers. Its transcript, without what differs
between two runs (``normalise.py``), must be that in ``golden/``, one file a story: what is printed,
exit status, chosen step, reasons of refusals, files that came and went with checksums of their
weights, events, and whether each loss is bit for bit that of a training without a stop. Nothing in
here imports anything of mindresume but these two names.

    python -m pytest -q tests/judge
    python -m tests.judge --update [NAME...]        NAME: a story, or a part of a case's name; without: all
    python -m tests.judge --update _ranks           those of st/test_judge.py: several ranks, and what takes longest
    git diff tests/judge/golden

A golden may change only if a user shall see the change: a message that is worded better, a new
field, another choice that the changelog states. The commit that changes it says why, for each kind
of change. A restructuring changes none: if a golden differs then, the code is wrong, not the
golden.
"""  # noqa: E501
