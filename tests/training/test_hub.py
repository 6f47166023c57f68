"""Whether the hub answers is known at the first try."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import huggingface_hub
import pytest

from p2ptrain.training.hub import is_hub_there


class Nothing(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    with http.server.HTTPServer(("127.0.0.1", 0), Nothing) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def test_a_hub_that_answers_is_there(server: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    assert is_hub_there()
    server.socket.close()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not is_hub_there()
