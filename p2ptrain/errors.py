"""Every error of the project, named by whose fault it is.

A message gives the value, the rule it broke and the fix. The command line turns a `ConfigError` into one line and
exit status 2; the others are normal life between volunteers' machines and never leave `Peer.step()`. Only a `GroupPeer`
that has lost one of its own processes cannot go on, and raises `PeerLostError`.
"""


class P2PTrainError(Exception):
    """Base of all errors raised on purpose by p2ptrain."""


class ConfigError(P2PTrainError, ValueError):
    """The user gave something that cannot work: a bad flag, file, address or model."""


class RunMismatchError(ConfigError):
    """A setting of this peer contradicts the run that it wants to join."""


class UnreachableError(ConfigError):
    """None of the peers that this one was to join through can be reached."""


class WireError(P2PTrainError):
    """A peer sent bytes that break the wire format; it loses the connection."""


class PeerLostError(P2PTrainError):
    """A peer cannot be reached, or went away while we waited for it; or a process of our own process group did."""


class CheckpointError(P2PTrainError):
    """A checkpoint could not be written, or is damaged; training and the other checkpoints are unharmed."""


class RoundFailedError(P2PTrainError):
    """One attempt at a round cannot go on; training does."""


class NetworkFailedError(P2PTrainError):
    """The network side of this peer failed again and again, by a fault of p2ptrain's own; training can go on alone."""
