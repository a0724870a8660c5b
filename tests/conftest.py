"""Fixtures shared by all tests; heavy ones live beside what they start."""

import os

# Inherited by every process that a test starts. The models are too small for two threads to gain anything, and threads
# that wait for one another on a busy machine make a step take seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.cluster.fixtures", "tests.fixtures_inputs"]
