"""`p2ptrain dashboard`: the page of a run that this machine takes no part in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from p2ptrain.errors import ConfigError
from p2ptrain.monitor.dashboard.dashboard import Source, showing
from p2ptrain.settings.table import Settings

logger = logging.getLogger(__name__)

# Between two attempts to reach the network, at first and at last.
AGAIN_S = (2.0, 30.0)
POLL_S = 0.5


def show_from_outside(settings: Settings, *, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; where the run cannot be reached it says so, and tries again.

    Raises:
        ConfigError: the page cannot be served.
        KeyboardInterrupt: Ctrl-C.
    """
    run_id = str(settings.values["run_id"])
    source = Source(run_id)
    with showing(source, settings.page_config()) as url:
        say(f"run {run_id!r} is shown at {url}")
        told, (wait_s, longest_s) = "", AGAIN_S
        while True:
            began_s = time.monotonic()
            try:
                _look(settings, source)
            except ConfigError as error:
                source.trouble = f"{error}; trying again"
                if told != source.trouble:
                    told = source.trouble
                    logger.warning("%s", told)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s) if time.monotonic() - began_s < longest_s else AGAIN_S[0]


def _look(settings: Settings, source: Source) -> None:
    """Look at the run until the network is lost for good. Raises ConfigError then, or when it cannot be reached."""
    from p2ptrain.peer.session import NetworkSession  # imports hivemind, which takes a second

    # Read anew each time: a file of addresses may have been written meanwhile.
    with NetworkSession.open(settings.network_config()) as session:
        watch = session.watch(source.run_id)
        source.watch, source.trouble = watch, ""
        try:
            while session.failure is None:
                time.sleep(POLL_S)
            raise session.failure
        finally:
            source.watch = None
            watch.stop()
