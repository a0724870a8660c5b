"""A group that trains, for all tests of what becomes of it."""

import pytest

from sft_trainer.supervisor.protocol import OrderKind
from tests.unit.supervisor.worlds import World


@pytest.fixture
def running() -> World:
    """Three pods that train."""
    world = World(3)
    world.obey()
    assert world.kind is OrderKind.RUN
    assert [report.running for report in world.reports.values()] == [20_001] * 3
    return world
