"""Prometheus metrics of a peer, read back over HTTP with the official parser."""

from __future__ import annotations

import math
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2ptrain.errors import ConfigError
from p2ptrain.monitor import prometheus
from p2ptrain.monitor.prometheus import PrometheusSink
from p2ptrain.settings.peer_config import parse_endpoint


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    sink = PrometheusSink("0")
    yield sink
    sink.close()


def _scrape(sink: PrometheusSink) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(sink.url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def _value(sink: PrometheusSink, name: str, **labels: str) -> float:
    return _scrape(sink)[f"p2ptrain_{name}", frozenset(labels.items())]


def _round(status: str, **fields: Any) -> dict[str, Any]:
    return {
        "status": status, "round": 6, "late": False, "group_size": 3, "bytes_sent": 500, "bytes_received": 700,
        "wall_s": 0.4, **fields,
    }  # fmt: skip


def test_a_peers_events_add_up(sink: PrometheusSink) -> None:
    sink.write(
        "start", run_id="novels", run_digest="0123456789abcdef", peer_id="QmA", maddrs=[], run={"model": "gpt-demo"}
    )
    sink.write("adopt", reason="founded the run", run_step=40, round=5)
    for n, loss in enumerate((3.0, 2.5)):
        sink.write("step", step=41 + n, loss=loss, tokens=256, step_s=0.02, exchange_s=0.0015)
    for _ in range(2):
        sink.write(
            "fragments", step=42, sent=5, merged=4, skipped={"epoch": 1}, bytes_sent=100, bytes_received=90,
            staleness=0.0,
        )  # fmt: skip
    sink.write("round", **_round("committed"))
    sink.write("round", **_round("committed", late=True, group_size=2, round=7))
    sink.write("round", **_round("skipped", group_size=0, round=8))
    sink.write("eval", step=42, loss=2.75)
    sink.write("peers", alive=["QmB", "QmC"])
    sink.write("daemon", status="died", reason="killed")
    sink.write("daemon", status="restarted", reason="")
    sink.write("unheard of", anything=1)

    found = _scrape(sink)
    (info,) = (dict(labels) for name, labels in found if name == "p2ptrain_info")
    assert (info["run_id"], info["peer_id"], info["model"]) == ("novels", "QmA", "gpt-demo")
    plain = {name.removeprefix("p2ptrain_"): value for (name, labels), value in found.items() if not labels}
    wanted = {
        "steps_total": 2, "tokens_total": 512, "loss": 2.5, "eval_loss": 2.75, "run_step": 42, "step_seconds": 0.02,
        "exchange_seconds_count": 2, "fragments_sent_total": 10, "fragments_merged_total": 8, "rounds_late_total": 1,
        "round_contributors": 2, "round": 7, "round_seconds_count": 2, "peers": 3, "daemon_restarts_total": 1,
    }  # fmt: skip
    assert {name: plain[name] for name in wanted} == wanted
    assert plain["exchange_seconds_sum"] == pytest.approx(0.003)
    assert _value(sink, "exchange_seconds_bucket", le="0.001") == 0
    assert _value(sink, "exchange_seconds_bucket", le="0.002") == 2
    assert _value(sink, "fragments_skipped_total", reason="epoch") == 2
    assert [_value(sink, "rounds_total", status=status) for status in ("committed", "solo", "skipped")] == [2, 0, 1]
    assert [_value(sink, "sent_bytes_total", traffic=traffic) for traffic in ("fragment", "round")] == [200, 1500]
    assert _value(sink, "received_bytes_total", traffic="round") == 2100


def test_steps_with_partners_are_counted_with_how_far_anchors_are(sink: PrometheusSink) -> None:
    fields = {"step": 50, "partner": "QmB", "reason": "", "bytes_sent": 10, "bytes_received": 20, "wall_s": 0.2}
    assert math.isnan(_value(sink, "anchor_spread"))
    sink.write("pair", status="paired", spread=0.04, distance=1.5, **fields)
    sink.write("pair", status="alone", spread=None, distance=None, **fields)
    assert [_value(sink, "pair_steps_total", status=status) for status in ("paired", "alone", "skipped")] == [1, 1, 0]
    assert _value(sink, "anchor_spread") == 0.04
    assert _value(sink, "sent_bytes_total", traffic="round") == 20


def test_a_unit_is_the_last_word_of_a_name(sink: PrometheusSink) -> None:
    """Prometheus's naming rules ask for it (before `_total` for counters)."""
    with urllib.request.urlopen(sink.url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    # The official client adds `_created`, the time of creation.
    ours = [family.name for family in families if family.name.startswith("p2ptrain_")]
    words = [name.removesuffix("_created").split("_") for name in ours]
    with_unit = [name for name in words if {"bytes", "seconds"} & set(name)]
    assert with_unit
    assert all(name[-1] in ("bytes", "seconds") for name in with_unit)


def test_unknown_values_are_nan(sink: PrometheusSink) -> None:
    assert math.isnan(_value(sink, "loss"))
    assert _value(sink, "peers") == 1
    sink.write("step", step=1, loss=None, tokens=256, step_s=0.02, exchange_s=0.001)
    sink.write("eval", step=1, accuracy=0.5)  # from a user's own training loop
    assert math.isnan(_value(sink, "loss"))
    assert math.isnan(_value(sink, "eval_loss"))


def test_a_loss_stays_until_the_next_one_is_known(sink: PrometheusSink) -> None:
    """A Trainer knows one every 50th step."""
    for step, loss in enumerate((2.5, None)):
        sink.write("step", step=step, loss=loss, tokens=1, step_s=0.1, exchange_s=0.1)
    assert _value(sink, "loss") == 2.5


def test_a_founder_has_no_round_before_the_first(sink: PrometheusSink) -> None:
    sink.write("adopt", reason="founded the run", run_step=0, round=-1)
    assert math.isnan(_value(sink, "round"))


def test_two_peers_in_one_process_have_separate_metrics(sink: PrometheusSink) -> None:
    other = PrometheusSink("127.0.0.1:0")
    other.write("step", step=1, loss=1.0, tokens=1, step_s=0.1, exchange_s=0.1)
    assert (_value(sink, "steps_total"), _value(other, "steps_total")) == (0, 1)
    other.close()


def test_it_listens_on_loopback_and_frees_the_port_when_it_closes() -> None:
    sink = PrometheusSink("0")
    assert sink.url.startswith("http://127.0.0.1:")
    endpoint = sink.url.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(ConfigError, match=rf"--prometheus {endpoint}: another program uses that port; choose another"):
        PrometheusSink(endpoint)
    sink.close()
    sink.close()
    PrometheusSink(endpoint).close()


def test_silent_clients_take_few_threads_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_TIMEOUT_S", 0.5)
    before = threading.active_count()
    sink = PrometheusSink("0")
    try:
        port = int(sink.url.rpartition(":")[2].partition("/")[0])
        with ExitStack() as stack:
            for _ in range(3 * prometheus.MOST_REQUESTS):
                stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(b"GET /")
                assert threading.active_count() <= before + 1 + prometheus.MOST_REQUESTS
            deadline = time.monotonic() + 30.0
            while threading.active_count() > before + 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert _value(sink, "peers") == 1
    finally:
        sink.close()


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="this machine does not have that address"):
        PrometheusSink("192.0.2.7:9100")
    with pytest.raises(ConfigError, match="must be PORT or HOST:PORT"):
        PrometheusSink("nine")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("9100", ("127.0.0.1", 9100)),
        ("0.0.0.0:9100", ("0.0.0.0", 9100)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:9100", ("::1", 9100)),
        *((text, None) for text in ("", ":9100", "host", "host:", "::1:9100", "65536", "-1", "1.5", "a b:1", "٣")),
    ],
)
def test_endpoints(text: str, parsed: tuple[str, int] | None) -> None:
    assert parse_endpoint(text) == parsed
