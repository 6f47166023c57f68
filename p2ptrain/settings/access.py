"""Which peers the user of this machine allows or refuses: files of peer ids that are read again when they change.

`PeerIdFile` is one file. `Access` combines them into one decision, which links and relay ask about each peer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from p2ptrain.errors import ConfigError
from p2ptrain.settings.files import open_file, reason_of
from p2ptrain.settings.peer_config import NetworkConfig
from p2ptrain.settings.peer_id import is_peer_id
from p2ptrain.settings.run_key import without_secrets
from p2ptrain.settings.setting import shortened

logger = logging.getLogger(__name__)

# Some 20,000 ids; a larger file is probably another one.
MAX_FILE_BYTES = 1024 * 1024
# Reasons that a refused peer is told. It recognizes them.
DENIED = "this peer is on its deny list"
NOT_ALLOWED = "this peer is not on its allow list"
REMEDY = "give a file with one peer id per line"
EXAMPLE = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class PeerIdFile:
    """A file with one peer id a line; `#` starts a comment. An empty list is allowed.

    `refresh` may be called in any thread; `ids` is replaced as a whole.

    Args:
        name: path of the file.
        flag: the option that named it, for messages.

    Raises:
        ConfigError: the file cannot be read, or a line is not a peer id.
    """

    def __init__(self, name: str, flag: str) -> None:
        self._name = name
        self._flag = flag
        self._complaint = ""
        # The content in use, and that of the last read.
        self._used = self._last = self._read()
        self.ids = self._parse(self._used)

    @property
    def origin(self) -> str:
        """The option and the file, for messages."""
        return f"{self._flag} {self._name}"

    def refresh(self) -> None:
        """Read the file again. If it cannot be used, log a warning once and keep the list.

        New content is used at the second call that finds it.
        """
        before = self.ids
        try:
            last, self._last = self._last, self._read()
            if self._last == self._used and not self._complaint:
                return
            # Many editors empty a file and then write it. A read in between finds nothing, or the first half, and an
            # empty allow list would close every link.
            if self._last != last:
                return
            self.ids = self._parse(self._last)
        except ConfigError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("%s; the previous list stays in use", error)
            return
        self._used, self._complaint = self._last, ""
        added, removed = len(self.ids - before), len(before - self.ids)
        logger.info("%s: read again, %d added, %d removed", self.origin, added, removed)

    def _read(self) -> bytes:
        """The content. All of it is compared with the previous content, as files' times are coarse."""
        try:
            with open_file(Path(self._name)) as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._flag} {shortened(self._name)}: {reason_of(error)}; {REMEDY}") from error
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{self.origin}: has more than {MAX_FILE_BYTES:,} bytes; {REMEDY}")
        return content

    def _parse(self, content: bytes) -> frozenset[str]:
        ids = set()
        for number, line in enumerate(content.decode("utf-8-sig", errors="replace").splitlines(), start=1):
            text = line.partition("#")[0].strip()
            if text and not is_peer_id(text):
                raise ConfigError(
                    f"{self.origin}, line {number}: {shortened(text)} is not a peer id; write only the id, "
                    f"as `p2ptrain peers` shows it, such as {EXAMPLE}"
                )
            ids.add(text)
        return frozenset(ids - {""})


class Access:
    """Decides whom this machine links with. Any thread may call it.

    Args:
        config: names the files. Raises ConfigError if one cannot be used.
    """

    def __init__(self, config: NetworkConfig) -> None:
        self._deny = None if config.deny is None else PeerIdFile(config.deny, "--deny")
        self._allow = None if config.allow is None else PeerIdFile(config.allow, "--allow")
        self._files = [file for file in (self._deny, self._allow) if file is not None]

    def check_allowed(self, addresses: Iterable[str]) -> None:
        """Raises ConfigError if an initial peer is refused: without it this machine would start a run of its own.

        Args:
            addresses: checked multiaddrs that end in the peer id.
        """
        for address in addresses:
            peer_id = address.rpartition("/p2p/")[2]
            shown = without_secrets(peer_id)
            if self._allow is not None and peer_id not in self._allow.ids:
                raise ConfigError(f"{self._allow.origin} does not hold your initial peer {shown}; add it")
            if self._deny is not None and peer_id in self._deny.ids:
                raise ConfigError(f"{self._deny.origin} holds your initial peer {peer_id}; remove it")

    @property
    def has_files(self) -> bool:
        """Whether there is anything to `refresh`."""
        return bool(self._files)

    def refusal(self, peer_id: str) -> str | None:
        """The reason for which this machine refuses a peer, as that peer is told; None if it does not."""
        if self._deny is not None and peer_id in self._deny.ids:
            return DENIED
        if self._allow is not None and peer_id not in self._allow.ids:
            return NOT_ALLOWED
        return None

    def refresh(self) -> None:
        """Read the files that have changed. Blocks; never raises."""
        for file in self._files:
            file.refresh()
