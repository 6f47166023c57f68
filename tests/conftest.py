"""For all tests."""

from __future__ import annotations

import signal

# Tests press Ctrl-C on processes that they start. A shell starts its background jobs with SIGINT ignored, and children
# inherit that: `make test &` would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
