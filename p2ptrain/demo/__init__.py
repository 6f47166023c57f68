"""`p2ptrain demo`: real peers on one machine train together, lose one, gain one, and show how it went.

Nothing here trains or exchanges anything: the peers are `p2ptrain join` processes, and all that is known of them is
read from the metrics files that every peer writes, and from their checkpoints.
"""
