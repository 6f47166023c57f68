"""Prometheus metrics of a peer: computed from its events and served over HTTP.

Names follow https://prometheus.io/docs/practices/naming/. A scrape does not touch the training thread; an event costs
it a few additions: 2.5 µs per step (measured).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from p2ptrain.errors import ConfigError
from p2ptrain.settings.extras import require_extra
from p2ptrain.settings.peer_config import LOOPBACK, parse_endpoint
from p2ptrain.version import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge

# An exchange takes 0.2 to 5 ms (docs/BENCHMARKS.md); the upper buckets are for machines that swap.
EXCHANGE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# From a demo on one machine to half an hour, the default time limit of an attempt.
ROUND_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 1800.0)
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
        from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server

        parsed = parse_endpoint(endpoint)
        if parsed is None:
            raise ConfigError(f"prometheus = {endpoint!r}: must be PORT or HOST:PORT, such as 9100 or 0.0.0.0:9100")
        host, port = parsed
        self._registry = CollectorRegistry()
        self._figures = _Figures(self._registry)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--prometheus {endpoint}: {_explain(error)}") from None
        self._thread.name = "p2ptrain-prometheus"
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def write(self, event: str, /, **fields: Any) -> None:
        """Count one event; ignore events without metrics."""
        if (take := getattr(self._figures, f"on_{event}", None)) is not None:
            take(fields)

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(CLOSE_TIMEOUT_S)
        self._server.server_close()


class _Figures:
    """The metrics, and one handler per event: `on_<event>` takes the fields of one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram, Info

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"p2ptrain_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"p2ptrain_{name}", text, registry=registry)

        self._info = Info("p2ptrain", "This peer and its run.", registry=registry)
        self._steps = counter("steps", "Inner steps that this peer has made.")
        self._tokens = counter("tokens", "Tokens, or other samples, that this peer has trained on.")
        self._loss = gauge("loss", "Training loss of this peer's last step, in nats.")
        self._eval_loss = gauge("eval_loss", "Newest loss on held-out data, in nats.")
        self._run_step = gauge("run_step", "The run's step that this peer has reached.")
        self._step_s = gauge("step_seconds", "Moving average of the time of an inner step without its exchange.")
        self._exchange_s = Histogram(
            "p2ptrain_exchange_seconds", "Time per step that the exchange blocked the training thread.",
            buckets=EXCHANGE_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._sent = counter("fragments_sent", "Fragments sent.")
        self._merged = counter("fragments_merged", "Fragments of other peers that were merged.")
        self._skipped = counter("fragments_skipped", "Fragments skipped, by reason (docs/metrics.md).", "reason")
        self._sent_bytes = counter("sent_bytes", "Bytes sent, for fragments and for rounds.", "traffic")
        self._received_bytes = counter("received_bytes", "Bytes received, for fragments and for rounds.", "traffic")
        self._rounds = counter("rounds", "Rounds applied here (committed, solo) or skipped.", "status")
        self._late = counter("rounds_late", "Committed rounds without this peer's outer gradient.")
        self._contributors = gauge("round_contributors", "Contributors of the last round applied here.")
        self._round = gauge("round", "Number of the last round applied here.")
        self._round_s = Histogram(
            "p2ptrain_round_seconds", "Duration of a round, from joining it to applying its result.",
            buckets=ROUND_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._peers = gauge("peers", "Live peers of the run, this one included.")
        self._restarts = counter("daemon_restarts", "Restarts of the libp2p daemon.")
        # Create all series at 0, so that rates are right from the first event on.
        for status in ("committed", "solo", "skipped"):
            self._rounds.labels(status)
        for traffic in ("fragment", "round"):
            self._sent_bytes.labels(traffic)
            self._received_bytes.labels(traffic)
        self._peers.set(1)
        for nothing_yet in (self._loss, self._eval_loss, self._round):
            nothing_yet.set(float("nan"))

    def on_start(self, fields: dict[str, Any]) -> None:
        self._info.info(
            {
                "version": __version__,
                "run_id": fields["run_id"],
                "run_digest": fields["run_digest"][:12],
                "peer_id": fields["peer_id"],
                "model": fields["run"]["model"],
            }
        )

    def on_adopt(self, fields: dict[str, Any]) -> None:
        self._run_step.set(fields["run_step"])
        self._round.set(fields["round"])

    def on_step(self, fields: dict[str, Any]) -> None:
        self._steps.inc()
        self._tokens.inc(fields["tokens"])
        self._run_step.set(fields["step"])
        self._step_s.set(fields["step_s"])
        self._exchange_s.observe(fields["exchange_s"])
        self._loss.set(_number(fields["loss"]))

    def on_fragments(self, fields: dict[str, Any]) -> None:
        self._sent.inc(fields["sent"])
        self._merged.inc(fields["merged"])
        for reason, number in fields["skipped"].items():
            self._skipped.labels(reason).inc(number)
        self._sent_bytes.labels("fragment").inc(fields["bytes_sent"])
        self._received_bytes.labels("fragment").inc(fields["bytes_received"])

    def on_round(self, fields: dict[str, Any]) -> None:
        self._rounds.labels(fields["status"]).inc()
        self._sent_bytes.labels("round").inc(fields["bytes_sent"])
        self._received_bytes.labels("round").inc(fields["bytes_received"])
        if fields["status"] == "skipped":
            return
        self._late.inc(fields["late"])
        self._round.set(fields["round"])
        self._contributors.set(fields["group_size"])
        self._round_s.observe(fields["wall_s"])

    def on_eval(self, fields: dict[str, Any]) -> None:
        # Training loops of users record this event too, with any fields.
        self._eval_loss.set(_number(fields.get("loss")))

    def on_peers(self, fields: dict[str, Any]) -> None:
        self._peers.set(1 + len(fields["alive"]))

    def on_daemon(self, fields: dict[str, Any]) -> None:
        self._restarts.inc(fields["status"] == "restarted")


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
