"""Examples are run as the commands of a swarm are."""

from tests.swarm.conftest import swarm as swarm
