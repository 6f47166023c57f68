"""Simulates whole swarms in one process and virtual time, with the node, protocol and training loop of real peers.

>>> records = simulate(Experiment.of(peers=8, steps=600, sync_every=100, fragment_fraction=0.02))
>>> records.final_loss
"""

from p2ptrain.simulation.experiment import Experiment, read_experiments
from p2ptrain.simulation.records import Records
from p2ptrain.simulation.scheduled_event import ScheduledEvent
from p2ptrain.simulation.swarm import simulate

__all__ = ["Experiment", "Records", "ScheduledEvent", "read_experiments", "simulate"]
