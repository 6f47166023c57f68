"""All errors of the project, named after the cause.

A message gives the value, the rule it broke and the fix. The command line prints a `ConfigError` as one line and exits
with status 2, or 75 for a `TransientError`. The other errors are expected between machines that come and go, and
`Peer.step()` does not raise them, with one exception: a `GroupPeer` that has lost one of its own processes raises
`PeerLostError`.
"""


class P2PTrainError(Exception):
    """Base class of all errors that p2ptrain raises."""


class ConfigError(P2PTrainError, ValueError):
    """Wrong input from the user: a flag, file, address or model."""


class RunMismatchError(ConfigError):
    """A setting of this peer contradicts the run that it is joining."""


class OtherRunError(RunMismatchError):
    """A peer belongs to another run."""


class RunKeyError(RunMismatchError):
    """This peer has another run key than the run that it is joining, or only one of them has a key."""


class TransientError(ConfigError):
    """No setting is wrong: the same command may work later."""


class UnreachableError(TransientError):
    """No initial peer can be reached."""


class WireError(P2PTrainError):
    """A peer sent bytes that break the wire format; its connection is closed."""


class PeerLostError(P2PTrainError):
    """A peer, or a process of our own process group, cannot be reached or was lost while we waited for it."""


class NotAllowedError(PeerLostError, ConfigError):
    """The user of another machine refuses this peer, by an allow list or a deny list."""


class CheckpointError(P2PTrainError):
    """A checkpoint could not be written, or is damaged; training and other checkpoints are not affected."""


class RoundFailedError(P2PTrainError):
    """One attempt at a round failed; training continues."""


class NetworkFailedError(P2PTrainError):
    """The network side of this peer failed repeatedly, by a bug of p2ptrain; training can go on alone."""
