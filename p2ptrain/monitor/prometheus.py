"""Prometheus metrics of a peer: computed from its events and served over HTTP.

Names follow https://prometheus.io/docs/practices/naming/. A scrape does not touch the training thread; an event costs
it a few additions: 2.5 µs per step (measured).
"""

from __future__ import annotations

import errno
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.network.socket_stream import close_everywhere
from p2ptrain.settings.extras import require_extra
from p2ptrain.settings.peer_config import ENDPOINT, LOOPBACK, parse_endpoint
from p2ptrain.version import __version__

# By name, without the prefix p2ptrain_: help and, for a counter of several series, its label.
COUNTERS = {
    "steps": ("Inner steps that this peer has made.",),
    "tokens": ("Tokens, or other samples, that this peer has trained on.",),
    "fragments_sent": ("Fragments sent.",),
    "fragments_merged": ("Fragments of other peers that were merged.",),
    "fragments_skipped": ("Fragments skipped, by reason (docs/use/metrics.md).", "reason"),
    "sent_bytes": ("Bytes sent, for fragments and for rounds.", "traffic"),
    "received_bytes": ("Bytes received, for fragments and for rounds.", "traffic"),
    "rounds": ("Rounds applied here (committed, solo) or skipped.", "status"),
    "pair_steps": ("Outer steps in a run with pairwise steps, with a partner (paired) or without.", "status"),
    "rounds_late": ("Committed rounds without this peer's outer gradient.",),
    "daemon_restarts": ("Restarts of the libp2p daemon.",),
}
GAUGES = {
    "loss": "Training loss of this peer's last step, in nats.",
    "eval_loss": "Newest loss on held-out data, in nats.",
    "run_step": "The run's step that this peer has reached.",
    "step_seconds": "Moving average of the time of an inner step without its exchange.",
    "round_contributors": "Contributors of the last round applied here.",
    "round": "Number of the last round applied here.",
    "anchor_spread": "How far an anchor is from the mean of all, relative to its size; by the last partner's.",
    "peers": "Live peers of the run, this one included.",
}
HISTOGRAMS = {
    # 0.2 to 5 ms (docs/evidence/benchmarks.md); the upper buckets are for machines that swap.
    "exchange_seconds": (
        "Time per step that the exchange blocked the training thread.",
        (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    ),
    # From a demo on one machine to half an hour, the default time limit of an attempt.
    "round_seconds": (
        "Duration of a round, from joining it to applying its result.",
        (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1800.0),
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
        self._counters = {
            name: client.Counter(f"p2ptrain_{name}", text, labels, registry=registry)
            for name, (text, *labels) in COUNTERS.items()
        }
        self._gauges = {
            name: client.Gauge(f"p2ptrain_{name}", text, registry=registry) for name, text in GAUGES.items()
        }
        self._histograms = {
            name: client.Histogram(f"p2ptrain_{name}", text, buckets=buckets, registry=registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        client.ProcessCollector(registry=registry)
        client.PlatformCollector(registry=registry)
        # Create all series at 0, so that rates are right from the first event on.
        for status in ("committed", "solo", "skipped"):
            self._counters["rounds"].labels(status)
        for status in ("paired", "alone", "skipped"):
            self._counters["pair_steps"].labels(status)
        for traffic in ("fragment", "round"):
            self._count_bytes(traffic, {"bytes_sent": 0, "bytes_received": 0})
        self._gauges["peers"].set(1)
        for unknown in ("loss", "eval_loss", "round", "anchor_spread"):
            self._gauges[unknown].set(float("nan"))
        try:
            self._server, self._thread = client.start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--prometheus {endpoint}: {_explain(error)}") from None
        self._thread.name = "p2ptrain-prometheus"
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def write(self, event: str, /, **fields: Any) -> None:
        """Count one event; ignore events without metrics."""
        counters, gauges = self._counters, self._gauges
        match event:
            case "start":
                self._info.info(
                    {
                        "version": __version__,
                        "run_id": fields["run_id"],
                        "run_digest": fields["run_digest"][:12],
                        "peer_id": fields["peer_id"],
                        "model": fields["run"]["model"],
                    }
                )
            case "adopt":
                gauges["run_step"].set(fields["run_step"])
                gauges["round"].set(fields["round"])
            case "step":
                counters["steps"].inc()
                counters["tokens"].inc(fields["tokens"])
                gauges["run_step"].set(fields["step"])
                gauges["step_seconds"].set(fields["step_s"])
                gauges["loss"].set(_number(fields["loss"]))
                self._histograms["exchange_seconds"].observe(fields["exchange_s"])
            case "fragments":
                counters["fragments_sent"].inc(fields["sent"])
                counters["fragments_merged"].inc(fields["merged"])
                for reason, number in fields["skipped"].items():
                    counters["fragments_skipped"].labels(reason).inc(number)
                self._count_bytes("fragment", fields)
            case "round":
                counters["rounds"].labels(fields["status"]).inc()
                self._count_bytes("round", fields)
                if fields["status"] != "skipped":
                    counters["rounds_late"].inc(fields["late"])
                    gauges["round"].set(fields["round"])
                    gauges["round_contributors"].set(fields["group_size"])
                    self._histograms["round_seconds"].observe(fields["wall_s"])
            case "pair":
                counters["pair_steps"].labels(fields["status"]).inc()
                self._count_bytes("round", fields)
                if fields["spread"] is not None:
                    gauges["anchor_spread"].set(fields["spread"])
            case "eval":
                # Training loops of users record this event too, with any fields.
                gauges["eval_loss"].set(_number(fields.get("loss")))
            case "peers":
                gauges["peers"].set(1 + len(fields["alive"]))
            case "daemon":
                counters["daemon_restarts"].inc(fields["status"] == "restarted")

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(CLOSE_TIMEOUT_S)
        close_everywhere(self._server.socket)
        self._server.server_close()

    def _count_bytes(self, traffic: str, fields: dict[str, Any]) -> None:
        self._counters["sent_bytes"].labels(traffic).inc(fields["bytes_sent"])
        self._counters["received_bytes"].labels(traffic).inc(fields["bytes_received"])


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
