"""Makes the part of docs/messages.md: the texts of every error, and the reasons for which a
checkpoint is not taken."""

from __future__ import annotations

from functools import cache

from scripts.make_docs.templates import REFUSAL, Message, Source, messages

SOURCE = "the raise statements in mindresume/"
INTERNAL = {  # {exception that no user meets: why it is not on the page}
    "_Gone": "the checkpoint is opened again, or a MissingCheckpointError is raised",
    "_NoCopyError": "becomes a note of the scrub",
    "UnknownOutcomeError": "an OSError inside a save, which looks what became of its file",
    "Stopped": "ends a command after a signal, with the exit status of that signal",
    "Killed": "a process of a drill that was killed on purpose",
    "Hang": "a verdict of the drill",
}
ROOMS = {  # {part of the package: when it raises, in English and Chinese}
    "settings": ("the settings of `mindresume:`", "配置段 `mindresume:`"),
    "launch": ("arguments of run_mindformer.py", "run_mindformer.py 的参数"),
    "mindformers": ("in the training", "训练中"),
    "resume": ("selection and verification of a checkpoint", "选择与校验 checkpoint"),
    "saving": ("saves, retention, uploads", "保存、保留策略、上传"),
    "coordination": ("leases and exchange between processes", "租约与进程间通信"),
    "reshard": ("another layout, conversion, Hugging Face", "重切分、转换、Hugging Face"),
    "formats": ("reading of folders, strategies and plans", "读取目录、切分策略与并行计划"),
    "tensor_files": ("reading of weight files", "读取权重文件"),
    "model": ("reading of records and manifests", "读取记录与清单"),
    "typed": ("reading of other small files of mindresume", "读取 mindresume 的其他小文件"),
    "storage": ("file systems and object stores", "文件系统与对象存储"),
    "events": ("events", "事件"),
    "api": ("Python API and commands", "Python 接口与命令"),
    "cli": ("commands", "命令"),
    "report": ("`mindresume report` and `advise`", "`mindresume report` 与 `advise`"),
    "supervisor": ("`mindresume run`", "`mindresume run`"),
    "fault_injection": ("`mindresume drill`", "`mindresume drill`"),
}
TITLES = {
    "en": ("Texts of `{}`", "Reasons why a checkpoint is not taken"),
    "zh": ("`{}` 的文本", "不选用某份 checkpoint 的原因"),
}


@cache
def source() -> Source:
    """Returns the source of the package, read once."""
    return Source.read()


def part(language: str) -> str:
    """Returns the part of the page in "en" or "zh"."""
    rows = found()
    of_error, of_refusals = TITLES[language]
    blocks = []
    for error in [*sorted({message.error for message in rows} - {REFUSAL}), REFUSAL]:
        blocks.append(f"### {of_refusals if error == REFUSAL else of_error.format(error)}")
        for room, labels in ROOMS.items():
            lines = [
                _code(message.template)
                for message in rows
                if (message.error, message.room) == (error, room)
            ]
            if lines:
                blocks += [
                    f"{labels[language == 'zh']}{'：' if language == 'zh' else ':'}",
                    "\n".join(lines),
                ]
    return "\n\n".join(blocks)


@cache
def found() -> list[Message]:
    """Returns the texts that are on the page."""
    return messages(source(), source().exceptions("MindResumeError") - set(INTERNAL))


def _code(text: str) -> str:
    return f"- `` {text} ``" if "`" in text else f"- `{text}`"
