"""Fixtures of swarms of real peers, for the tests of the page."""

from tests.swarm.conftest import swarm as swarm
