"""What the log says of a step that cannot be committed."""
from folders import path_of, place_of, write_rank

from mindresume.store.commit import Committer


def test_the_reason_is_logged_once_and_told_at_the_end(tmp_path):
    for rank in range(2):
        write_rank(tmp_path, 5, rank, 2)
    path_of(tmp_path, 5, 1).write_bytes(b"short")
    now, log = [0.0], []
    committer = Committer(place_of(tmp_path, 0, 2), log=log.append, clock=lambda: now[0],
                          sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    committer.saved(5)
    assert committer.finish(deadline=60.0) == {5: []}
    assert len(log) == 2
    assert "step 5 is not committed: rank_1/net_rank_1-1_5.safetensors: recorded" in log[1] and "within 60 s" in log[1]
