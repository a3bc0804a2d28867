"""A webhook gets the events of a supervisor, and cannot hold it up."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mindresume.errors import ConfigError
from mindresume.events import GaveUp, JobRestarted, Notice, RankDied, SupervisorEnded
from mindresume.supervisor.notify import KEPT, Notifier, Webhook, notifier

DEATH = RankDied(1, "node-0", 4711, rank=3, status=-9, phase="training", step=437)
SHORT = 0.2  # seconds of a deadline that passes
LONG = 60.0
TOKEN = "3f1a-token"


class Server:
    """A local HTTP server. ``answers``: (status, body) of the next requests, then 200; a body that
    is None is never sent. ``bodies``: what was posted."""

    def __init__(self):
        self.answers, self.bodies, self.is_over = [], [], threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers["Content-Length"])
                outer.bodies.append(json.loads(self.rfile.read(length)))
                status, body = outer.answers.pop(0) if outer.answers else (200, b"ok")
                if status:
                    self.send_response(status)
                    self.send_header("Location", f"{outer.url}elsewhere")
                    self.end_headers()
                if body is None:  # the rest comes one byte at a time, or never
                    while not outer.is_over.wait(SHORT / 10):
                        self.wfile.write(b" " if status else b"")
                else:
                    self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/{TOKEN}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.is_over.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def pauses():
    return []


@pytest.fixture
def post(server, warnings, pauses):
    def post(event=DEATH, format="json", deadline=LONG):
        hook = Webhook(server.url, format, warnings.append, deadline, pauses.append)
        hook.handle(event, 1000.5)
        return hook

    return post


def test_a_program_gets_the_event_and_its_line(server, post, warnings):
    post()
    (body,) = server.bodies
    assert body.items() >= DEATH.to_json().items() and body["time"] == 1000.5
    assert DEATH.line() in body["text"] and not warnings


@pytest.mark.parametrize(
    ("format", "text_of", "taken", "refused"),
    [
        ("feishu", lambda it: it["content"]["text"], b'{"code": 0}', b'{"code": 19001}'),
        ("dingtalk", lambda it: it["text"]["content"], b'{"errcode": 0}', b'{"errcode": 310000}'),
        ("wecom", lambda it: it["text"]["content"], b'{"errcode": 0}', b"<html>log in first"),
    ],
)
def test_a_chat_that_refuses_answers_200(server, post, warnings, format, text_of, taken, refused):
    server.answers = [(200, refused), (200, taken)]
    post(format=format)
    assert [DEATH.line() in text_of(body) for body in server.bodies] == [True, True]
    assert not warnings
    server.answers = [(200, refused)] * 3
    post(format=format)
    assert len(warnings) == 1


def test_slack_answers_no_json(server, post, warnings):
    post(format="slack")
    assert [list(body) for body in server.bodies] == [["text"]] and not warnings


def test_a_text_is_as_long_as_the_chats_take_it(server, post):
    post(GaveUp(1, "失败" * 2000, 6), format="slack")
    assert 1900 < len(server.bodies[0]["text"].encode()) <= 2000


def test_the_reason_of_a_restart_is_in_the_text(server, post):
    post(JobRestarted(2, 0.0, "node 1 is lost"))
    assert "node 1 is lost" in server.bodies[0]["text"]


def test_it_is_tried_again_and_a_failure_is_said_once(server, post, warnings, pauses):
    server.answers = [(500, b""), (429, b"")]
    post()
    assert len(server.bodies) == 3 and len(pauses) == 3 and not warnings
    server.answers = [(404, b"")] * 6
    hook = post()
    hook.handle(DEATH, 1001.0)
    assert len(warnings) == 1 and TOKEN not in warnings[0].text
    hook.handle(DEATH, 1002.0)  # is taken
    server.answers = [(404, b"")] * 3
    hook.handle(DEATH, 1003.0)
    assert len(warnings) == 2 and len(server.bodies) == 13


def test_a_redirect_is_no_answer(server, post, warnings):
    server.answers = [(302, b""), (301, b""), (307, b"")]
    post()
    assert len(server.bodies) == 3 and len(warnings) == 1


@pytest.mark.parametrize("status", [0, 200], ids=["it hangs", "it is slow"])
def test_a_request_has_a_deadline(server, post, warnings, status):
    server.answers = [(status, None)] * 3
    post(deadline=SHORT)
    assert len(warnings) == 1


def test_nobody_listens(server, post, warnings):
    server.server.server_close()
    post()
    assert len(warnings) == 1 and TOKEN not in warnings[0].text


class Hanging:
    """A handler that waits in its first event until ``is_over``."""

    def __init__(self):
        self.handled, self.began, self.is_over = [], threading.Event(), threading.Event()

    def handle(self, event, time_s):
        self.began.set()
        self.is_over.wait()
        self.handled.append(event.start)

    def close(self):
        pass


def test_the_newest_messages_are_kept_while_a_server_hangs(warnings):
    hook = Hanging()
    made = Notifier(hook, {DEATH.kind}, warnings.append)
    made.handle(RankDied(0, "node-0", 1), 0.0)
    assert hook.began.wait(LONG)
    for start in range(1, KEPT + 11):
        made.handle(Notice("not asked for"), 0.0)
        made.handle(RankDied(start, "node-0", 1), 0.0)
    hook.is_over.set()
    made.close()
    assert hook.handled == [0, *range(11, KEPT + 11)] and not warnings


def test_the_end_does_not_wait_for_a_server(warnings):
    hook = Hanging()
    made = Notifier(hook, {DEATH.kind}, warnings.append, SHORT)
    made.handle(DEATH, 0.0)
    made.close()
    assert not hook.handled and len(warnings) == 1
    hook.is_over.set()


def made(url="https://example.com/hook", format="json", kinds="", node=0):
    return notifier(url, format, kinds, node, print).kinds


def test_which_events_are_posted():
    ends = {GaveUp.kind, SupervisorEnded.kind}
    assert {DEATH.kind, JobRestarted.kind} | ends <= made()
    assert made(node=1) == made() - ends  # node 0 says it for all
    assert made(kinds=" gave_up, job_ended", node=1) == {"gave_up", "job_ended"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": TOKEN},
        {"url": f"ftp://example.com/{TOKEN}"},
        {"url": f"https:///{TOKEN}"},
        {"url": f"https://example.com:port/{TOKEN}"},
        {"url": f"https://example.com/a b{TOKEN}"},
        {"format": "telegram"},
        {"kinds": "gave_up,died"},
    ],
)
def test_a_wrong_option_is_refused_and_the_secret_not_shown(wrong):
    with pytest.raises(ConfigError) as caught:
        made(**wrong)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://[::1]:8080/x", "https://chat.example.com?key=1", "http://host"]
)
def test_a_url_is_taken(url):
    assert made(url)
