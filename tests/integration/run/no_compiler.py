"""A worker as ``python -m sft_trainer``, without a compiler where its rank is among those of ``NO_COMPILER``."""

import os
import runpy

if os.environ["RANK"] in os.environ["NO_COMPILER"].split():
    # Not in the environment, which torch has read: whoever forked this process has imported it.
    from torch._inductor import config

    config.cpp.cxx = (None, "/no-compiler")

if __name__ == "__main__":
    runpy.run_module("sft_trainer", run_name="__main__")
