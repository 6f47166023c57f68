"""The one place that imports hivemind, with the side effects of its import undone.

Importing hivemind 1.1.12 puts a handler that writes to the terminal on its logger, renames the level WARNING for the
whole process, and settles `multiprocessing` on its default start method, so that the user's own
`multiprocessing.set_start_method` would fail. It takes 0.8 s when torch is already imported.
"""

from __future__ import annotations

import logging
import multiprocessing
import os

_start_method = multiprocessing.get_start_method(allow_none=True)
_warning_name = logging.getLevelName(logging.WARNING)

from hivemind.dht import DHTNode  # noqa: E402
from hivemind.dht.crypto import RSASignatureValidator  # noqa: E402
from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.validation import DHTRecord  # noqa: E402
from hivemind.hivemind_cli import __path__ as cli_path  # noqa: E402
from hivemind.p2p import P2P, PeerID  # noqa: E402
from hivemind.proto import crypto_pb2, dht_pb2, p2pd_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer, get_dht_time  # noqa: E402
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey  # noqa: E402
from hivemind.utils.logging import use_hivemind_log_handler  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

multiprocessing.set_start_method(_start_method, force=True)
logging.addLevelName(logging.WARNING, _warning_name)
use_hivemind_log_handler("nowhere")
# Its messages tell of peers that went away, which is normal life; HIVEMIND_LOGLEVEL=DEBUG brings them back.
logging.getLogger("hivemind").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "CRITICAL"))

__all__ = [
    "P2P",
    "DHTNode",
    "DHTProtocol",
    "DHTRecord",
    "MSGPackSerializer",
    "Multiaddr",
    "PeerID",
    "RSAPrivateKey",
    "RSAPublicKey",
    "RSASignatureValidator",
    "cli_path",
    "crypto_pb2",
    "dht_pb2",
    "get_dht_time",
    "p2pd_pb2",
]
