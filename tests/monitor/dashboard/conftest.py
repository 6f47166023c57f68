"""The page is looked at while real peers train."""

from tests.swarm.conftest import swarm as swarm
