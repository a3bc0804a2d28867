"""Reads the settings that mindformers has no key for: the YAML's top-level ``mindresume:`` section,
or environment variables.

    mindresume:
      on_save_error: raise
      memory_tier:
        every_steps: 10

``MINDRESUME_ON_SAVE_ERROR`` and so on override the file. A setting that is a frozen dataclass is a
section of its own below ``mindresume:``; ``MINDRESUME_SECTION_KEY`` overrides one of its keys.
docs/settings.md lists all settings; its tables are made of the dataclasses below by ``python -m
scripts.make_docs``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from mindresume.errors import ConfigError


def setting(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    limits: tuple[int, float] = (0, math.inf),
) -> Any:
    """Returns a field of a dataclass of settings.

    Args:
        default: the value without configuration; its type is that of the setting. A dataclass of
            settings makes a section.
        meaning: what the setting does, for docs/settings.md, in Markdown.
        unit: the unit of a number, or another word for the values that are accepted.
        choices: the only values that are accepted; empty: any of the type.
        limits: the least and the largest number that is accepted.
    """
    return field(
        default=default,
        metadata={"meaning": meaning, "unit": unit, "choices": choices, "limits": limits},
    )


def group(default: Any) -> Any:
    """Returns a field for settings that belong together, whose keys stand in the section of the
    others."""
    return field(default=default, metadata={"group": True})


@dataclass(frozen=True)
class MemoryTierSettings:
    """Holds the settings of the tier in memory."""

    every_steps: int = setting(
        0, "saves into memory fall on absolute multiples of it; 0: off", unit="steps"
    )
    dir: str = setting("/dev/shm", "the tmpfs that holds these saves", unit="path")
    limit_gib: float = setting(
        0.0, "limit of the memory for each rank; 0: the rank's share of the free memory", unit="GiB"
    )
    keep_days: float = setting(
        7.0,
        "a later job removes what a dead job left here, if nothing was saved there for so long",
        unit="days",
    )
    write_after_error: int = setting(
        1,
        "1: a training that ends with an error first writes the newest of these saves to disk; 0: "
        "it does not",
        unit="0 or 1",
    )
    partner: bool = setting(
        False,
        "each node also keeps the newest saves of another node, its partner "
        "([partner copies](memory_tier.md#partner-copies))",
        unit="true or false",
    )
    partner_offset: int = setting(
        1,
        "the partner is so many nodes further, in the order of ranks",
        unit="nodes",
        limits=(1, math.inf),
    )
    partner_port: int = setting(
        0, "the port on which a node receives copies; 0: a free one", unit="port", limits=(0, 65535)
    )


@dataclass(frozen=True)
class RetentionSettings:
    """Says which checkpoints stay besides those of ``keep_checkpoint_max``."""

    keep_every_steps: int = setting(
        0,
        "besides `keep_checkpoint_max`: keeps the first checkpoint at or after each multiple of "
        "it; 0: off",
        unit="steps",
    )
    keep_best: int = setting(
        0,
        "besides `keep_checkpoint_max`: keeps so many of the best checkpoints by "
        "`keep_best_metric`; 0: off",
        unit="checkpoints",
    )
    keep_best_metric: str = setting(
        "loss",
        "`loss`: the loss of the saved step; or a name that your code passes to "
        '`mindresume.plugin.report_metric("eval_loss", '
        "2.31)`",
        unit="name",
    )
    keep_best_mode: str = setting(
        "min",
        "which values of `keep_best_metric` are best: the smallest or the largest",
        choices=("min", "max"),
    )


_RESPONSES = ("off", "warn", "stop", "rollback")


@dataclass(frozen=True)
class GuardSettings:
    """Says what a bad step is and what follows it."""

    nan: str = setting(
        "off",
        "the loss or the norm of the gradients of a step is NaN or infinite: `warn` says so; "
        "`stop` ends the job with status 68; `rollback` ends it with status 67, and the next start "
        "takes the newest checkpoint before the step and skips its samples",
        choices=_RESPONSES,
    )
    loss_spike: str = setting(
        "off",
        "the same for a loss that lies far above the last ones",
        choices=_RESPONSES,
    )
    grad_norm: str = setting(
        "off",
        "the same for a norm of the gradients that lies far above the last ones",
        choices=_RESPONSES,
    )
    window: int = setting(
        128, "with so many steps before it a value is compared", unit="steps", limits=(8, 1024)
    )
    factor: float = setting(
        10.0,
        "a value is a spike if it lies more than so many deviations above the median of these "
        "steps ([the rule](guard.md#the-rule))",
        unit="deviations",
        limits=(1, math.inf),
    )
    min_steps: int = setting(
        32,
        "with fewer steps, so also after each start, no value is a spike; NaN counts from the "
        "first step on",
        unit="steps",
        limits=(4, 1024),
    )
    skip_steps: int = setting(
        1,
        "a rollback skips the samples of so many steps, beginning with the bad one",
        unit="steps",
        limits=(1, math.inf),
    )
    max_rollbacks: int = setting(
        3,
        "after so many rollbacks in a row without a good checkpoint between them the next bad step "
        "ends the job with status 68",
        unit="rollbacks",
    )

    @property
    def ends_job(self) -> bool:
        """Returns whether a bad step can end the job."""
        return not {self.nan, self.loss_spike, self.grad_norm} <= {"off", "warn"}

    @property
    def is_on(self) -> bool:
        """Returns whether any step can be bad."""
        return any(kind != "off" for kind in (self.nan, self.loss_spike, self.grad_norm))


@dataclass(frozen=True)
class ConversionSettings:
    """Says how ``auto_trans_ckpt`` converts."""

    transform_engine: str = setting(
        "auto",
        "what converts a checkpoint for `auto_trans_ckpt`: `direct` (mindresume), `mindspore` "
        "(which first merges safetensors "
        "to output/unified_checkpoint), or `auto`: `mindspore` for ckpt, `direct` for safetensors",
        choices=("auto", "direct", "mindspore"),
    )
    unified_checkpoint: int = setting(
        0,
        "1: `auto_trans_ckpt` also writes the merged weights to output/unified_checkpoint",
        unit="0 or 1",
    )


@dataclass(frozen=True)
class MetricsSettings:
    """Says where numbers for Prometheus are written."""

    textfile: str = setting(
        "",
        "the folder of node_exporter's textfile collector, into which rank 0 writes numbers for "
        "Prometheus; empty: none",
        unit="path",
    )
    training: str = setting(
        "",
        "the label `training` of these numbers, another one for each training; empty: its output "
        "folder",
        unit="name",
    )


@dataclass(frozen=True)
class PublishSettings:
    """Says which weights are published for others, and where."""

    every_steps: int = setting(
        0,
        "publishes the first checkpoint at or after each multiple of it as Hugging Face weights; "
        "0: off",
        unit="steps",
    )
    dir: str = setting("", "the folder for them, outside of the checkpoints", unit="path")
    dtype: str = setting(
        "keep",
        "their dtype; `keep`: that of the checkpoint",
        choices=("keep", "bfloat16", "float32"),
    )
    keep: int = setting(
        2,
        "so many of them stay, and those that a reader holds",
        unit="folders",
        limits=(1, math.inf),
    )
    config: str = setting(
        "",
        "the `config.json` of the Hugging Face model, or its folder; empty: `pretrained_model_dir`",
        unit="path",
    )


@dataclass(frozen=True)
class Settings:
    """Holds the settings of a run."""

    on_save_error: str = setting(
        "warn",
        "a failed save (full disk, quota, I/O error): `warn` logs an error and the training "
        "continues; `raise` ends the training",
        choices=("warn", "raise"),
    )
    max_failed_saves: int = setting(
        3,
        "so many failed saves in a row end the training also with `on_save_error: warn`; 0: no "
        "limit",
        unit="saves",
    )
    commit_timeout: float = setting(
        600.0,
        "longest wait of the end of the training for the records of slow ranks, and of a save for "
        "the previous one",
        unit="seconds",
    )
    verify: str = setting(
        "full",
        "what a start checks before it loads a checkpoint: `full` reads every byte; `quick` checks "
        "sizes and headers only",
        choices=("full", "quick"),
    )
    async_when_busy: str = setting(
        "wait",
        "a background save is due while the previous one is being written: `wait` for it; or "
        "`skip` the new one, on all ranks",
        choices=("wait", "skip"),
    )
    staging_gib: float = setting(
        0.0,
        "limit of the host memory of a rank for the copy that a background save writes from, and "
        "for verified files until they "
        "are loaded; 0: as much as they need, within the rank's share of the free memory",
        unit="GiB",
    )
    heartbeat: float = setting(
        15.0,
        "time between two heartbeats of a job in its checkpoint folder, by which other hosts see "
        "that it is alive; 0: none",
        unit="seconds",
    )
    retention: RetentionSettings = group(RetentionSettings())
    conversion: ConversionSettings = group(ConversionSettings())
    allow_missing: tuple[str, ...] = setting(
        (),
        "patterns (`lora_*`) of parameters that a checkpoint may lack when weights alone are "
        "loaded, and in Checkpoint 2.0; "
        "they keep their initial values. Separated by commas in the environment",
        unit="list of patterns",
    )
    on_dataset_change: str = setting(
        "warn",
        "the data set differs from that of the checkpoint, and the configuration does not declare "
        "it: `warn`, or stop with an `error`",
        choices=("warn", "error"),
    )
    on_resume_difference: str = setting(
        "warn",
        "a step that is trained for the second time differs from the first time "
        "([proof of a resume](reliability.md#the-proof-of-a-resume)): `warn`, or `stop` the job "
        "with status 66",
        choices=("warn", "stop"),
    )
    proof: str = setting(
        "auto",
        "how the weights are compared with what was loaded, at the first step "
        "([proof of a resume](reliability.md#the-proof-of-a-resume)): `full`: every byte; "
        "`sample`: blocks of each tensor over 1 MiB; `off`: nothing; `auto`: `full` on a CPU and "
        "for ranks up to 1 GiB, else `sample`",
        choices=("auto", "full", "sample", "off"),
    )
    proof_tolerance: float = setting(
        0.0,
        "relative difference that the loss of a step may have when it is trained for the second "
        "time; 0: none where layout and release are the same and the computation is "
        "deterministic, else by the dtype",
        unit="fraction",
    )
    max_failed_loads: int = setting(
        2,
        "a checkpoint after whose loading so many jobs in a row died before their first step is "
        "suspected: it is taken only if "
        "no other can be; 0: no checkpoint is suspected ([jobs](jobs.md#crash-loops))",
        unit="jobs",
    )
    keep_graphs: int = setting(
        0,
        "1: the compiled graph is kept for the next start of the same configuration, release and "
        "source ([supervisor](supervisor.md#graphs-that-are-kept)); 0: each start compiles",
        unit="0 or 1",
    )
    preemption_check_interval: float = setting(
        5.0,
        "approximate time between the checks of all ranks for SIGTERM or graceful exit; 0: no "
        "checks",
        unit="seconds",
    )
    memory_tier: MemoryTierSettings = setting(
        MemoryTierSettings(),
        "saves into memory of the node, which a restart on the same nodes loads ([memory "
        "tier](memory_tier.md))",
    )
    guard: GuardSettings = setting(
        GuardSettings(),
        "ends a training at a bad step, goes back, and skips its samples ([bad steps](guard.md))",
    )
    metrics: MetricsSettings = setting(
        MetricsSettings(), "numbers for Prometheus ([monitoring](monitoring.md))"
    )
    publish: PublishSettings = setting(
        PublishSettings(),
        "writes Hugging Face weights for others while the training goes on "
        "([publishing](publish.md))",
    )

    def allows(self, name: str) -> bool:
        """Returns whether a checkpoint may lack this parameter."""
        return any(fnmatchcase(name, pattern) for pattern in self.allow_missing)

    @classmethod
    def load(
        cls, section: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
    ) -> Settings:
        """Reads the settings from the YAML ``section``; ``environment`` (default: the process's)
        overrides it. Raises ConfigError for an unknown key, one that no longer exists, or an
        invalid value."""
        environment = os.environ if environment is None else environment
        gone = ["mindresume.scrub"] if isinstance(section, Mapping) and "scrub" in section else []
        gone += [name for name in sorted(environment) if name.startswith("MINDRESUME_SCRUB_")]
        if gone:
            raise ConfigError(
                f"{gone[0]} no longer exists: a training does not scrub. Remove it, and run "
                "mindresume scrub DIR "
                f"[--repair] [--rate MB/s] from cron or a Kubernetes CronJob (docs/scrub.md)"
            )
        if isinstance(section, Mapping) and "notify" in section:
            raise ConfigError(
                "mindresume.notify: notifications come from the supervisor, which reads no YAML. "
                "Remove the key, and give mindresume run --notify-url URL, or set MSRUN_NOTIFY_URL "
                "(docs/notifications.md)"
            )
        settings: Settings = _section(cls, "mindresume", section, environment)
        if settings.guard.ends_job and not settings.preemption_check_interval:
            raise ConfigError(
                "mindresume.guard ends a job by the exchange that preemption_check_interval "
                "configures, which is 0: off. Remove that key, or set guard to warn or off"
            )
        return settings


def _section(kind: type, where: str, section: Any, environment: Mapping[str, str]) -> Any:
    """Returns a ``kind``, a dataclass of settings. ``where``: the keys that lead to its YAML
    section, with dots between them."""
    names = [known.name for known in settings_of(kind)]
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(
            f"{where} is {section!r}; expected a section with the keys {', '.join(names)}"
        )
    unknown = [key for key in section or () if key not in names]
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {unknown[0]!r} in the YAML section; known: {', '.join(names)}"
        )
    return _made(kind, where, section or {}, environment)


def _made(kind: type, where: str, values: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Returns a ``kind`` of the ``values`` of a section."""
    found = {}
    for known in fields(kind):
        name = f"{where}.{known.name}"
        variable = variable_of(name)
        if known.metadata.get("group"):
            found[known.name] = _made(type(known.default), where, values, environment)
        elif is_dataclass(known.default):
            found[known.name] = _section(
                type(known.default), name, values.get(known.name), environment
            )
        elif variable in environment or known.name in values:
            found[known.name] = _value(
                name, known, environment.get(variable, values.get(known.name))
            )
    return kind(**found)


def variable_of(name: str) -> str:
    """Returns the environment variable of a setting; ``name``: its keys with dots between them,
    such as mindresume.verify."""
    return name.replace(".", "_").upper()


def settings_of(kind: type) -> Iterator[Field[Any]]:
    """Yields the fields whose names are the keys of a section, in its order."""
    for known in fields(kind):
        if known.metadata.get("group"):
            yield from settings_of(type(known.default))
        else:
            yield known


def _value(where: str, known: Field[Any], value: Any) -> Any:
    """Returns a setting converted to the type of its default. Raises ConfigError for an invalid
    value."""
    kind: type[Any] = type(known.default)
    choices = known.metadata.get("choices")
    if choices:
        if value is False and "off" in choices:  # YAML's off
            value = "off"
        if value not in choices:
            raise ConfigError(f"{where} is {value!r}; choose one of {', '.join(choices)}")
        return value
    if kind is tuple:
        rows = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(rows, (list, tuple)) or not all(
            isinstance(row, str) and row.strip() for row in rows
        ):
            raise ConfigError(
                f"{where} is {value!r}; expected a list of patterns such as ['lora_*']"
            )
        return tuple(rows)
    if kind is bool:
        found = {"1": True, "true": True, "0": False, "false": False}.get(str(value).lower())
        if found is None:
            raise ConfigError(f"{where} is {value!r}; expected true or false")
        return found
    if kind is str:
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{where} is {value!r}; expected a text that is not empty")
        return value
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = -1
    least, most = known.metadata.get("limits", (0, math.inf))
    if (
        isinstance(value, bool)
        or not least <= number <= most
        or (kind is int and isinstance(value, float) and number != value)
    ):
        raise ConfigError(
            f"{where} is {value!r}; expected a {'whole ' if kind is int else ''}number of at least "
            f"{least}" + ("" if most == math.inf else f", at most {most}")
        )
    return number
