"""Every byte of a checkpoint compared with what was written, for people: ``mindresume verify``."""
from __future__ import annotations

from mindresume.formats import Refusal
from mindresume.resume.prove import Progress, prove
from mindresume.resume.remarks import damaged_beside, stand_in_text
from mindresume.resume.survey import Seen
from mindresume.resume.understood import Layouts
from mindresume.store.storage import Storage


def verified(storage: Storage, root: str, row: Seen, progress: Progress = lambda count: None) -> list[Refusal]:
    """Returns what is damaged or missing of one step of ``survey``; nothing: all is as it was written."""
    candidate, problem = row.candidate, None if row.candidate.part else row.problem     # a part is what it should be
    layouts = Layouts(storage, root, candidate)
    proofs = [] if candidate.problem else [prove(storage, root, candidate, rank, progress, layouts=layouts)
                                           for rank in candidate.files]
    bad = [proof for proof in proofs if isinstance(proof, Refusal)]
    lost = [row for proof in proofs if not isinstance(proof, Refusal) for row in proof.lost(candidate)]
    bad += [candidate.refuse(stand_in_text([(rank, path)])[0], path, rank) for rank, path in lost]
    bad += damaged_beside(storage, root, candidate)
    bad = list(dict.fromkeys(bad))                      # of metadata.json every rank says the same
    return bad or ([problem] if problem else [])
