"""`p2ptrain demo`: peers on one machine train together, one is killed, one joins, and a report shows the results.

The peers are `p2ptrain join` processes. The demo only starts them and reads their metrics files and checkpoints.
"""
