"""What peers answered when asked for a run's settings, and whose answer counts. Pure."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection

from p2ptrain.errors import ConfigError
from p2ptrain.protocol.wire.transport import PeerId
from p2ptrain.settings.config import RunConfig

logger = logging.getLogger(__name__)


class SettingsAnswers:
    """The answers of peers to one joiner; `p2ptrain.protocol.membership.lookup.ask_settings` explains the arguments.

    Attributes:
        answered: the peers that gave settings, or settings that we cannot use.
        failures: how often each peer could not be asked.
    """

    def __init__(self, chosen: Collection[PeerId], ours: RunConfig | None, fits: Callable[[RunConfig], bool]) -> None:
        self.answered: set[PeerId] = set()
        self.failures: Counter[PeerId] = Counter()
        self._chosen = chosen
        self._ours = ours
        self._fits = fits
        self._answer: RunConfig | ConfigError | None = None
        self._hearsay: RunConfig | None = None
        self._misfit: RunConfig | None = None

    def add(self, peer_id: PeerId, told: RunConfig | ConfigError) -> None:
        """A peer's settings, or why this version of p2ptrain cannot use them."""
        self.answered.add(peer_id)
        if peer_id in self._chosen:
            self._answer = told
        elif isinstance(told, ConfigError):
            logger.warning("%s", told)
        elif self._ours is not None and told != self._ours:
            logger.warning("peer %s trains run %r with different settings", peer_id, told.run_id)
        elif not self._fits(told):
            self._misfit = self._misfit or told
        else:
            self._hearsay = self._hearsay or told

    @property
    def best(self) -> RunConfig | ConfigError | None:
        """The answer that counts: of a chosen peer, else one that fits, else any."""
        return self._answer or self._hearsay or self._misfit

    def is_enough(self, found: Collection[PeerId]) -> bool:
        """Whether no outstanding answer of the announced peers would take precedence over the best one so far."""
        # An initial peer without a record may be a bootstrap node, which answers no Hello.
        waiting = any(peer_id in self._chosen for peer_id in self.untried(found))
        all_answered = self.answered.issuperset(found)
        return (
            self._answer is not None
            or (self._hearsay is not None and not waiting)
            or (self._misfit is not None and all_answered)
        )

    def untried(self, found: Collection[PeerId]) -> set[PeerId]:
        """Those of the announced peers that neither answered nor failed."""
        return {peer_id for peer_id in found if peer_id not in self.answered and not self.failures[peer_id]}
