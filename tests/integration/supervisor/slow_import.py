"""A module that takes longer than any test waits."""

import time

time.sleep(3600)
