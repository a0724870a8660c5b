"""The real package with another worker: everything but ``__main__`` is found where it always is."""

import os

__path__.append(os.environ["REAL_SFT_TRAINER"])
