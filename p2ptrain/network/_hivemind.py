# ruff: noqa: F401
"""The only module that imports hivemind. It undoes the side effects of that import.

Importing hivemind 1.1.12 adds a terminal handler to its logger, renames the level WARNING for the whole process, and
fixes `multiprocessing`'s start method, so that the user's `multiprocessing.set_start_method` would fail. Its averager,
which we do not use, imports scipy.optimize: 70 % of the time, and 38 MB.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from types import ModuleType

_start_method = multiprocessing.get_start_method(allow_none=True)
_warning_name = logging.getLevelName(logging.WARNING)
# An empty module during the import; `scipy.optimize` is imported when somebody uses it.
_placeholder = ModuleType("scipy.optimize")
_skipped = sys.modules.setdefault("scipy.optimize", _placeholder) is _placeholder

try:
    from hivemind.dht import DHTNode
    from hivemind.dht.crypto import RSASignatureValidator
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID, RoutingTable
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.dht.validation import DHTRecord
    from hivemind.hivemind_cli import __path__ as cli_path
    from hivemind.p2p import P2P, PeerID
    from hivemind.proto import crypto_pb2, dht_pb2, p2pd_pb2
    from hivemind.utils import MSGPackSerializer, get_dht_time
    from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
finally:
    if _skipped:
        del sys.modules["scipy.optimize"]
multiprocessing.set_start_method(_start_method, force=True)
logging.addLevelName(logging.WARNING, _warning_name)
use_hivemind_log_handler("nowhere")
# hivemind logs mostly lost peers, which is normal. HIVEMIND_LOGLEVEL=DEBUG shows these messages.
logging.getLogger("hivemind").setLevel(os.environ.get("HIVEMIND_LOGLEVEL", "CRITICAL"))
