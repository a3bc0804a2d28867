"""Posts the events of a supervisor to a webhook, such as that of a chat bot.

    node ─▶ Notifier (a queue and a thread) ─▶ Webhook: up to three tries, each with a deadline

The URL is a secret: with it anybody can write into the chat. So a message has no more of it than
the host. No redirect is followed: it makes a GET of a POST.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from urllib.request import HTTPRedirectHandler, Request, build_opener

from mindresume import runtime
from mindresume.errors import ConfigError
from mindresume.events import (
    PREFIX,
    Emit,
    Event,
    GaveUp,
    Handler,
    HangDetected,
    JobRestarted,
    RankDied,
    SlowRank,
    SlowSave,
    SupervisorEnded,
    supervision,
    warning,
)
from mindresume.storage import call_within
from mindresume.supervisor.evidence import BackgroundHandler

KEPT = 64  # messages that wait; while more do, the oldest are dropped
_DEADLINE = 10.0  # seconds for one request
_PAUSES = (0.0, 1.0, 3.0)  # seconds before each try
_PATIENCE = 6.0  # seconds for which the end of the supervisor waits
_MAX_BYTES = 2000  # of a text: WeCom takes 2048
_URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?([/?][!-~]*)?", re.ASCII)
KINDS = {known.kind for known in vars(supervision).values() if getattr(known, "kind", "")}
# of the whole job: with several nodes, node 0 alone posts them
_ENDS = {GaveUp.kind, SupervisorEnded.kind}
_SLOW = {SlowRank.kind, SlowSave.kind}
_DEFAULT = {RankDied.kind, HangDetected.kind, JobRestarted.kind, *_SLOW, *_ENDS}
_JSON = "json"
# {format: what is posted, as JSON around a text}, as the services document it
FORMATS = {
    _JSON: '{"text": %s}',
    "feishu": '{"msg_type": "text", "content": {"text": %s}}',
    "dingtalk": '{"msgtype": "text", "text": {"content": %s}}',
    "wecom": '{"msgtype": "text", "text": {"content": %s}}',
    "slack": '{"text": %s}',
}
# these answer with status 200 also if they refuse a message; this number is 0 if they took it
_CODES = {"feishu": "code", "dingtalk": "errcode", "wecom": "errcode"}


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *arguments: object) -> None:
        return None


class Webhook(Handler):
    """Posts each event, in at most three tries. Reports the first failure in a row.

    Args:
        url: as the service gave it.
        format: one of FORMATS.
        deadline: seconds for one request, with everything that belongs to it.
        pause: waits so many seconds.
    """

    def __init__(
        self,
        url: str,
        format: str,
        emit: Emit,
        deadline: float = _DEADLINE,
        pause: Callable[[float], None] = runtime.sleep,
    ):
        self.url, self.format = url, format
        self.emit = emit
        self.deadline, self.pause = deadline, pause
        self._folder = os.getcwd()  # says which job
        self._is_failing = False

    def handle(self, event: Event, time_s: float) -> None:
        host, line, reason = runtime.gethostname(), event.line(), getattr(event, "reason", "")
        said = line if reason in line else f"{line}: {reason}"
        text = f"{PREFIX}{host} {self._folder}: {said}".encode()[:_MAX_BYTES].decode(
            errors="ignore"
        )
        body = FORMATS[self.format] % json.dumps(text)
        if self.format == _JSON:
            body = json.dumps({"time": time_s, "host": host, "text": text, **event.to_json()})
        for pause in _PAUSES:
            self.pause(pause)
            late = f"no answer within {self.deadline:.0f} s"
            error = call_within(self.deadline, late, self._post, body)
            if not error:
                break
        if error and not self._is_failing:
            where = _URL.match(self.url)[1]
            self.emit(
                warning(f"{where} does not take a notification: {error}; later ones are tried")
            )
        self._is_failing = bool(error)

    def _post(self, body: str) -> str:
        """Returns why a message was not taken; empty: it was."""
        request = Request(self.url, body.encode(), {"Content-Type": "application/json"})
        try:
            with build_opener(_NoRedirect).open(request, timeout=self.deadline) as response:
                answer = response.read(1 << 16)
            name = _CODES.get(self.format)
            is_taken = name is None or json.loads(answer)[name] == 0
        except Exception as error:
            return f"{type(error).__name__} {error}"
        return "" if is_taken else answer.decode(errors="replace")


class Notifier(BackgroundHandler):
    """Passes the events of ``kinds`` to a webhook. ``emit``: also receives a warning while this is
    being closed."""

    def __init__(self, webhook: Handler, kinds: set[str], emit: Emit, patience: float = _PATIENCE):
        super().__init__(webhook, patience=patience, kept=KEPT)
        self.kinds, self.emit = kinds, emit

    def handle(self, event: Event, time_s: float) -> None:
        if event.kind in self.kinds:
            super().handle(event, time_s)

    def close(self) -> None:
        super().close()
        if self._thread is not None and self._thread.is_alive():
            self.emit(warning("the last notifications were not taken in time and are lost"))


def notifier(url: str, format: str, kinds: str, node: int, emit: Emit) -> Notifier:
    """Returns what the options of ``mindresume run`` ask for. ``kinds``: of events, with commas
    between them; empty: the default. ``node``: number of this node. Raises ConfigError."""
    if not _URL.fullmatch(url):
        raise ConfigError(
            "--notify-url (MSRUN_NOTIFY_URL) is not a URL of http or https; give the whole one "
            "that the chat shows for its bot, for example https://open.feishu.cn/open-apis/bot/v2/"
            "hook/TOKEN (what was given is not shown: it can be a secret)"
        )
    if format not in FORMATS:
        raise ConfigError(
            f"--notify-format (MSRUN_NOTIFY_FORMAT) is {format!r}; choose one of "
            f"{', '.join(FORMATS)}"
        )
    asked = set(re.findall(r"[^\s,]+", kinds))
    if asked - KINDS:
        raise ConfigError(
            f"--notify-events (MSRUN_NOTIFY_EVENTS) has {', '.join(sorted(asked - KINDS))}; the "
            f"supervisor has the events {', '.join(sorted(KINDS))}"
        )
    default = _DEFAULT - _ENDS if node else _DEFAULT
    return Notifier(Webhook(url, format, emit), asked or default, emit)
