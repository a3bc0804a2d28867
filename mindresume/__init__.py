"""Saves and resumes trainings of MindSpore Transformers (``mindformers``).

A training installs it with ``import mindresume.plugin`` (or with the repository's
``run_mindformer.py``). ``mindresume`` is the command line. docs/api.md describes the Python API:

    catalog = mindresume.open("output/checkpoint")
    catalog.steps(), catalog.latest(), catalog.select(world_size=8).chosen, catalog.verify().damaged
    catalog[500].tensors["embedding.weight"].shape, catalog[500].read("embedding.weight")
    mindresume.convert("output/checkpoint", "new", to="dp=4,tp=2")

Importing this package, like the command line, imports neither mindspore nor mindformers. A name of
the API imports its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindresume.api.catalog import Catalog, Selection, open
    from mindresume.api.checkpoint import Checkpoint, TensorInfo, TensorSlice
    from mindresume.api.conversion import ConversionResult, convert, export_hf, merge
    from mindresume.api.inspection import Comparison, Inspection, TensorDifference, compare, inspect
    from mindresume.api.maintenance import (
        PruneResult,
        ScrubbedCheckpoint,
        ScrubReport,
        prune,
        scrub,
    )
    from mindresume.api.publication import published
    from mindresume.api.results import (
        CheckpointInfo,
        CheckpointVerification,
        DirectoryUser,
        Listing,
        Problem,
        VerificationReport,
    )
    from mindresume.errors import MindResumeError
    from mindresume.report.advice import Advice, TierAdvice, advise
    from mindresume.saving.retention import (
        KeepAny,
        KeepBest,
        KeepEverySteps,
        KeepLast,
        KeepPerMinutes,
    )

__version__ = "0.1.0"

# {module: names of the API that are imported from it at their first use}
_MODULES = {
    "api.catalog": ("Catalog", "Selection", "open"),
    "api.checkpoint": ("Checkpoint", "TensorInfo", "TensorSlice"),
    "api.conversion": ("ConversionResult", "convert", "export_hf", "merge"),
    "api.inspection": ("Comparison", "Inspection", "TensorDifference", "compare", "inspect"),
    "api.maintenance": ("PruneResult", "ScrubReport", "ScrubbedCheckpoint", "prune", "scrub"),
    "api.results": (
        "CheckpointInfo",
        "CheckpointVerification",
        "DirectoryUser",
        "Listing",
        "Problem",
        "VerificationReport",
    ),
    "api.publication": ("published",),
    "errors": ("MindResumeError",),
    "report.advice": ("Advice", "TierAdvice", "advise"),
    "saving.retention": ("KeepAny", "KeepBest", "KeepEverySteps", "KeepLast", "KeepPerMinutes"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Advice",
    "Catalog",
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointVerification",
    "Comparison",
    "ConversionResult",
    "DirectoryUser",
    "Inspection",
    "KeepAny",
    "KeepBest",
    "KeepEverySteps",
    "KeepLast",
    "KeepPerMinutes",
    "Listing",
    "MindResumeError",
    "Problem",
    "PruneResult",
    "ScrubReport",
    "ScrubbedCheckpoint",
    "Selection",
    "TensorDifference",
    "TensorInfo",
    "TensorSlice",
    "TierAdvice",
    "VerificationReport",
    "advise",
    "compare",
    "convert",
    "export_hf",
    "inspect",
    "merge",
    "open",
    "prune",
    "published",
    "scrub",
]


# a type checker would take any name of this module for one that exists
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
