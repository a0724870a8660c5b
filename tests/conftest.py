"""Fixtures shared by all tests; heavy ones live beside what they start."""

pytest_plugins = ["tests.cluster.fixtures", "tests.fixtures_inputs"]
