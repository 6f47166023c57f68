"""Prometheus metrics of a peer: computed from its events and served over HTTP.

Names follow https://prometheus.io/docs/practices/naming/. A scrape does not involve the training thread. Counting the
events of a step takes 2.5 µs there (measured).
"""

from __future__ import annotations

import errno
import threading
from typing import Any

from p2ptrain import __version__
from p2ptrain.errors import ConfigError
from p2ptrain.network.process_lifetime import close_everywhere
from p2ptrain.settings.extras import require_extra
from p2ptrain.settings.peer_config import ENDPOINT, LOOPBACK, parse_endpoint

# A server of Prometheus asks every few seconds, and gets its answer in one packet (guesses).
MOST_REQUESTS, REQUEST_TIMEOUT_S = 32, 10.0
# By name, without the prefix p2ptrain_: kind, help, and more arguments of that kind.
METRICS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "steps": ("Counter", "Inner steps that this peer has made.", {}),
    "tokens": ("Counter", "Tokens, or other samples, that this peer has trained on.", {}),
    "fragments_sent": ("Counter", "Fragments sent.", {}),
    "fragments_merged": ("Counter", "Fragments of other peers that were merged.", {}),
    "fragments_skipped": ("Counter", "Fragments skipped, by reason (docs/use/metrics.md).", {"labelnames": ["reason"]}),
    "sent_bytes": ("Counter", "Bytes sent, for fragments and for rounds.", {"labelnames": ["traffic"]}),
    "received_bytes": ("Counter", "Bytes received, for fragments and for rounds.", {"labelnames": ["traffic"]}),
    "rounds": ("Counter", "Rounds applied here (committed, solo) or skipped.", {"labelnames": ["status"]}),
    "pair_steps": (
        "Counter",
        "Outer steps in a run with pairwise steps, with a partner (paired) or without.",
        {"labelnames": ["status"]},
    ),
    "rounds_late": ("Counter", "Committed rounds without this peer's outer gradient.", {}),
    "daemon_restarts": ("Counter", "Restarts of the libp2p daemon.", {}),
    "loss": ("Gauge", "Newest training loss of this peer, in nats.", {}),
    "eval_loss": ("Gauge", "Newest loss on held-out data, in nats.", {}),
    "run_step": ("Gauge", "The run's step that this peer has reached.", {}),
    "step_seconds": ("Gauge", "Moving average of the time of an inner step without its exchange.", {}),
    "round_contributors": ("Gauge", "Contributors of the last round applied here.", {}),
    "round": ("Gauge", "Number of the last round applied here.", {}),
    "anchor_spread": (
        "Gauge",
        "How far an anchor is from the mean of all, relative to its size; by the last partner's.",
        {},
    ),
    "peers": ("Gauge", "Live peers of the run, this one included.", {}),
    "exchange_seconds": (
        "Histogram",
        "Time per step that the exchange blocked the training thread.",
        # 0.2 to 5 ms (docs/evidence/benchmarks.md); the upper buckets are for machines that swap.
        {"buckets": (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)},
    ),
    "round_seconds": (
        "Histogram",
        "Duration of a round, from joining it to applying its result.",
        # From a demo on one machine to half an hour, the default time limit of an attempt.
        {"buckets": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1800.0)},
    ),
}
# Time for running scrapes to end when the peer leaves.
CLOSE_TIMEOUT_S = 2.0


class PrometheusSink:
    """A metrics sink that serves a peer's metrics at `url`, from its own registry.

    Attributes:
        url: address to scrape.
    """

    def __init__(self, endpoint: str) -> None:
        """Start to listen.

        Args:
            endpoint: `PORT` (on loopback) or `HOST:PORT`; port 0 chooses a free one.

        Raises:
            ConfigError: `endpoint` is invalid or cannot be listened on, or prometheus_client is not installed.
        """
        require_extra("dashboard", "--prometheus")
        import prometheus_client as client

        parsed = parse_endpoint(endpoint)
        if parsed is None:
            raise ConfigError(f"prometheus = {endpoint!r}: must be {ENDPOINT.text}")
        host, port = parsed
        registry = client.CollectorRegistry()
        self._info = client.Info("p2ptrain", "This peer and its run.", registry=registry)
        self._metrics: dict[str, Any] = {
            name: getattr(client, kind)(f"p2ptrain_{name}", text, registry=registry, **more)
            for name, (kind, text, more) in METRICS.items()
        }
        client.ProcessCollector(registry=registry)
        client.PlatformCollector(registry=registry)
        # Create all series at 0, so that rates are right from the first event on.
        for status in ("committed", "solo", "skipped"):
            self._metrics["rounds"].labels(status)
        for status in ("paired", "alone", "skipped"):
            self._metrics["pair_steps"].labels(status)
        for traffic in ("fragment", "round"):
            self._count_bytes(traffic, {"bytes_sent": 0, "bytes_received": 0})
        self._metrics["peers"].set(1)
        for unknown in ("loss", "eval_loss", "round", "anchor_spread"):
            self._metrics[unknown].set(float("nan"))
        try:
            self._server, self._thread = client.start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--prometheus {endpoint}: {_explain(error)}") from None
        self._thread.name = "p2ptrain-prometheus"
        _bound(self._server)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def write(self, event: str, /, **fields: Any) -> None:
        """Count one event; ignore events without metrics."""
        metrics = self._metrics
        match event:
            case "start":
                run = {"run_id": fields["run_id"], "run_digest": fields["run_digest"][:12]}
                peer = {"peer_id": fields["peer_id"], "model": fields["run"]["model"]}
                self._info.info({"version": __version__, **run, **peer})
            case "adopt":
                metrics["run_step"].set(fields["run_step"])
                if fields["round"] >= 0:
                    metrics["round"].set(fields["round"])
            case "step":
                metrics["steps"].inc()
                metrics["tokens"].inc(fields["tokens"])
                metrics["run_step"].set(fields["step"])
                metrics["step_seconds"].set(fields["step_s"])
                if fields["loss"] is not None:  # a Trainer knows one only every few steps
                    metrics["loss"].set(_number(fields["loss"]))
                metrics["exchange_seconds"].observe(fields["exchange_s"])
            case "fragments":
                metrics["fragments_sent"].inc(fields["sent"])
                metrics["fragments_merged"].inc(fields["merged"])
                for reason, number in fields["skipped"].items():
                    metrics["fragments_skipped"].labels(reason).inc(number)
                self._count_bytes("fragment", fields)
            case "round":
                metrics["rounds"].labels(fields["status"]).inc()
                self._count_bytes("round", fields)
                if fields["status"] != "skipped":
                    metrics["rounds_late"].inc(fields["late"])
                    metrics["round"].set(fields["round"])
                    metrics["round_contributors"].set(fields["group_size"])
                    metrics["round_seconds"].observe(fields["wall_s"])
            case "pair":
                metrics["pair_steps"].labels(fields["status"]).inc()
                self._count_bytes("round", fields)
                if fields["spread"] is not None:
                    metrics["anchor_spread"].set(fields["spread"])
            case "eval":
                # Training loops of users record this event too, with any fields.
                metrics["eval_loss"].set(_number(fields.get("loss")))
            case "peers":
                metrics["peers"].set(1 + len(fields["alive"]))
            case "daemon":
                metrics["daemon_restarts"].inc(fields["status"] == "restarted")

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(CLOSE_TIMEOUT_S)
        close_everywhere(self._server.socket)
        self._server.server_close()

    def _count_bytes(self, traffic: str, fields: dict[str, Any]) -> None:
        self._metrics["sent_bytes"].labels(traffic).inc(fields["bytes_sent"])
        self._metrics["received_bytes"].labels(traffic).inc(fields["bytes_received"])


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _explain(error: Exception) -> str:
    reason = getattr(error, "errno", None)
    if reason == errno.EADDRINUSE:
        return "another program uses that port; choose another one, or 0 for a free one"
    if reason == errno.EACCES:
        return "ports below 1024 need special permissions; choose a higher one"
    if reason == errno.EADDRNOTAVAIL:
        return f"this machine does not have that address; give the port alone ({LOOPBACK}), or 0.0.0.0:PORT for all"
    return f"cannot listen ({getattr(error, 'strerror', None) or error}); give a port, such as 9100"


def _bound(server: Any) -> None:
    """Limit what its clients can take: each connection is a thread and an open file, and may say nothing for ever."""

    class Handler(server.RequestHandlerClass):  # type: ignore[misc]
        timeout = REQUEST_TIMEOUT_S

    def has_place(request: object, address: object) -> bool:
        return sum(thread.name.endswith("(process_request_thread)") for thread in threading.enumerate()) < MOST_REQUESTS

    server.RequestHandlerClass = Handler
    server.verify_request = has_place
    server.handle_error = lambda request, address: None  # it would print the traceback of a client that hung
