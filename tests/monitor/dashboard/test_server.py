"""The page's server: its responses, and the requests that it refuses."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.monitor.dashboard.page_state import PageState
from p2ptrain.monitor.dashboard.server import HEADERS, MOST_CONNECTIONS, STATIC, is_known_host, showing
from p2ptrain.protocol.event_log.observer import View
from p2ptrain.settings.peer_config import PageConfig
from tests.monitor.dashboard.madeup import MadeUpSwarm, ids

ANY_PORT = PageConfig(port=0)


@pytest.fixture
def swarm() -> MadeUpSwarm:
    made_up = MadeUpSwarm()
    made_up.start(*ids(3), at_s=time.time() - 120)
    made_up.live(120)
    return made_up


@pytest.fixture
def page(swarm: MadeUpSwarm) -> Iterator[str]:
    with showing(PageState("novels", swarm), ANY_PORT) as url:
        yield url


def get(url: str, path: str = "/", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, data


def stream(url: str, *wanted: str) -> dict[str, Any]:
    """The first value of each wanted part from the event stream."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.request("GET", "/api/state")
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    found: dict[str, Any] = {}
    name = ""
    while not set(wanted) <= found.keys():
        line = answer.readline().decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found[name] = json.loads(line.removeprefix("data: "))
    connection.close()
    return found


def test_a_browser_gets_the_whole_state_at_once(page: str, swarm: MadeUpSwarm) -> None:
    parts = stream(page, "run", "overview", "rounds", "notices")
    assert parts["run"] == {"run_id": "novels", "trouble": ""}
    overview = parts["overview"]
    assert (overview["up"], overview["step"], overview["parameters"]) == (3, 120, 850_000)
    assert [peer["n"] for peer in overview["peers"]] == [1, 2, 3]
    assert {peer["id"] for peer in overview["peers"]} == set(swarm.peers)
    assert all(set(peer["to"]) <= {"1", "2", "3"} for peer in overview["peers"])
    assert overview["bytes"]["dense"] == pytest.approx(2 * 2 / 3 * 4 * 850_000)
    assert overview["correlation"] > 0.99
    assert len(parts["rounds"]) == 4
    assert "founded the run" in parts["notices"][-1]["text"]


def test_curves_come_on_request(page: str) -> None:
    status, headers, data = get(page, "/api/curves?range=0", **{"Accept-Encoding": "identity"})
    curves = json.loads(data)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert len(curves["loss"]["1"]) == len(curves["t"]) == len(curves["correlation"])
    assert sum(value is not None for value in curves["loss"]["2"]) > 40
    assert get(page, "/api/curves?range=7")[0] == 400


def test_every_answer_is_safe_and_nothing_comes_from_elsewhere(page: str) -> None:
    for path in ("/", "/static/app.js", "/static/uplot/uPlot.iife.min.js", "/api/curves", "/nowhere"):
        _, headers, _ = get(page, path)
        assert HEADERS.items() <= headers.items(), path
        assert "server" not in headers
    for file in STATIC.glob("*.*"):
        text = file.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, file
        assert "innerHTML" not in text, file
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    assert "style=" not in index
    assert "<script>" not in index
    assert (STATIC / "uplot" / "LICENSE").is_file()


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/../setup.cfg", "/static/"])
def test_only_the_pages_own_files_are_given(page: str, path: str) -> None:
    assert get(page, path)[0] == 404


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True), ("LOCALHOST:8080", True), ("127.0.0.1:8080", True), ("10.1.2.3", True), ("[::1]:80", True),
        ("::1", True), ("mine", True), ("mine:80", True),
        ("evil.example", False), ("localhost.evil.example", False), ("127.0.0.1.nip.example", False), ("", False),
        ("1", False), ("[evil.example]", False), ("mine.evil.example", False),
    ],
)  # fmt: skip
def test_unknown_host_names_are_refused(host: str, known: bool) -> None:
    assert is_known_host(host, frozenset({"mine"})) is known


def test_a_request_for_an_unknown_host_name_gets_403(page: str) -> None:
    status, _, data = get(page, "/api/state", Host="evil.example:8080")
    assert (status, b"--page-names" in data) == (403, True)
    assert b"novels" not in data


def test_a_page_that_a_browser_still_looks_at_ends_soon(swarm: MadeUpSwarm) -> None:
    with showing(PageState("novels", swarm), ANY_PORT) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
        connection.request("GET", "/api/state")
        connection.getresponse().readline()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=5)
    connection.close()


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"port {port}: .*in use; choose another port"),
            showing(PageState("novels"), PageConfig(port=port)),
        ):
            pass


def test_an_address_of_another_machine_is_an_error() -> None:
    with (
        pytest.raises(ConfigError, match=r"192\.0\.2\.7.*an address of this machine"),
        showing(PageState("novels"), PageConfig(host="192.0.2.7", port=0)),
    ):
        pass


def test_a_page_without_a_connection_shows_why() -> None:
    source = PageState("novels")
    source.trouble = "no peer answers"
    with showing(source, ANY_PORT) as url:
        parts = stream(url, "run", "overview")
    assert parts["run"]["trouble"] == "no peer answers"
    assert parts["overview"]["peers"] == []


# --- other machines ----------------------------------------------------------------------------------------------


@pytest.fixture
def open_page(swarm: MadeUpSwarm) -> Iterator[str]:
    """The address, with its token, of a page that other machines can reach."""
    with showing(PageState("novels", swarm), PageConfig(host="0.0.0.0", port=0)) as url:
        yield url


PATHS = ("/", "/api/state", "/api/curves?range=0", "/static/app.js", "/nowhere")


def test_a_page_for_other_machines_gives_nothing_without_its_token(open_page: str) -> None:
    token = urlsplit(open_page).query.removeprefix("token=")
    assert len(token) >= 22
    for path in PATHS:
        joint = "&" if "?" in path else "?"
        for wrong in ("", f"{joint}token=", f"{joint}token={token[:-1]}", f"{joint}token={token}x", f"{joint}token=ä"):
            status, headers, data = get(open_page, path + wrong.replace("ä", "%C3%A4"))
            assert status == 401
            assert HEADERS.items() <= headers.items()
            assert data.startswith(b"This page needs a token. Open the whole address that p2ptrain printed")
        assert get(open_page, path, Cookie=f"p2ptrain_{urlsplit(open_page).port}=wrong")[0] == 401
    # The guard against DNS rebinding goes before it.
    assert get(open_page, "/?" + urlsplit(open_page).query, Host="evil.example")[0] == 403


def test_the_printed_address_becomes_a_cookie_for_the_requests_of_the_page(open_page: str) -> None:
    status, headers, _ = get(open_page, "/?" + urlsplit(open_page).query)
    assert (status, headers["location"]) == (303, "/")
    cookie, *attributes = headers["set-cookie"].lower().split("; ")
    assert {"httponly", "samesite=lax", "path=/"} <= set(attributes)
    cookie = headers["set-cookie"].partition(";")[0]
    assert cookie.startswith(f"p2ptrain_{urlsplit(open_page).port}=")
    for path in ("/", "/api/curves?range=0", "/static/app.js"):
        assert get(open_page, path, Cookie=f"other=1; {cookie}")[0] == 200
    assert get(open_page, "/nowhere", Cookie=cookie)[0] == 404
    # Scripts may give the token itself.
    assert get(open_page, "/api/curves?range=0&" + urlsplit(open_page).query)[0] == 200


def test_each_page_has_a_token_of_its_own_and_one_for_this_machine_has_none(page: str, open_page: str) -> None:
    assert "token" not in page
    with showing(PageState("novels"), PageConfig(host="0.0.0.0", port=0)) as other:
        assert urlsplit(other).query != urlsplit(open_page).query


# --- connections -------------------------------------------------------------------------------------------------


def half_request(url: str) -> socket.socket:
    connection = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=20)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost")
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other side closes it."""
    try:
        return connection.recv(1024) == b""
    except ConnectionError:
        return True


def test_half_requests_lock_no_one_out(page: str) -> None:
    watching = http.client.HTTPConnection(urlsplit(page).netloc, timeout=20)
    watching.request("GET", "/api/state")
    events = watching.getresponse()
    held = [half_request(page) for _ in range(260)]
    for _ in range(10):
        assert get(page)[0] == 200
    # The oldest made room, and the stream of a browser did not.
    assert all(map(is_closed, held[: len(held) - MOST_CONNECTIONS]))
    for _ in range(3):
        assert events.readline()
    for connection in held:
        connection.close()
    watching.close()


def test_when_all_places_are_taken_by_requests_new_connections_are_closed(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2ptrain.monitor.dashboard.server.MOST_CONNECTIONS", 3)
    streams = []
    for _ in range(3):
        connection = http.client.HTTPConnection(urlsplit(page).netloc, timeout=20)
        connection.request("GET", "/api/state")
        streams.append((connection, connection.getresponse()))
    assert is_closed(half_request(page))
    for connection, answer in streams:
        assert answer.readline()
        connection.close()


@pytest.mark.parametrize("after_a_request", [False, True])
def test_a_request_has_a_deadline(page: str, monkeypatch: pytest.MonkeyPatch, after_a_request: bool) -> None:
    monkeypatch.setattr("p2ptrain.monitor.dashboard.server.REQUEST_TIMEOUT_S", 2.0)
    watching = http.client.HTTPConnection(urlsplit(page).netloc, timeout=20)
    watching.request("GET", "/api/state")
    events = watching.getresponse()
    with socket.create_connection((urlsplit(page).hostname, urlsplit(page).port), timeout=20) as connection:
        if after_a_request:
            connection.sendall(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"404" in connection.recv(65536)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost")
        assert is_closed(connection)
    # A stream has no deadline.
    for _ in range(8):
        assert events.readline()
    watching.close()


class Broken:
    """A watch whose network has ended."""

    def take(self) -> View:
        raise RuntimeError("the network thread has stopped")


def test_a_watch_that_ends_does_not_end_the_page() -> None:
    with showing(PageState("novels", Broken()), ANY_PORT) as url:
        assert stream(url, "overview")["overview"]["up"] == 0


def test_the_package_ships_the_page() -> None:
    text = (Path(__file__).parents[3] / "setup.cfg").read_text(encoding="utf-8")
    assert "p2ptrain.monitor.dashboard = static/*, static/uplot/*" in text
