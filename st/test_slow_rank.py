"""The supervisor names the rank whose data comes late, also to a webhook; and none in a normal
training."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from st.run_attempts import LIMIT
from st.supervised_run import supervised, supervisor_events
from st.training_run import ROOT

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def webhook():
    """Yields the URL of a server, and what was posted to it."""
    posted = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", posted
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("slow", ["2", pytest.param("none", marks=pytest.mark.soak)])
def test_the_rank_whose_data_comes_late_is_named(whole_four, tmp_path, slow, webhook):
    url, posted = webhook
    run = whole_four.like(tmp_path / "run", program=ROOT / "st" / "programs" / "slow_data.py")
    supervised(run, "--slow-factor", "3", SLOW_RANK=slow, MSRUN_NOTIFY_URL=url)
    run.wait_for_success(LIMIT)
    found = {event["rank"] for event in supervisor_events(run, "slow_rank")}
    assert found == ({2} if slow == "2" else set())
    assert {row["rank"] for row in posted if row["event"] == "slow_rank"} == found
    assert posted[-1]["event"] == "supervisor_ended" and posted[-1]["status"] == 0
