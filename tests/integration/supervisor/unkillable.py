"""A supervisor whose workers survive SIGKILL, as what is stuck in the kernel does: ``python -m unkillable``.

Somebody keeps a connection to it as well, for whose end ``asyncio.Server`` waits since Python 3.12.
"""

import asyncio
import os

import sft_trainer.launch
from sft_trainer.supervisor import node


async def never(_: object) -> None:
    await asyncio.Event().wait()


os.killpg = lambda *_: None
asyncio.Server.wait_closed = never
node.UNKILLABLE_SECONDS = float(os.environ["SURVIVES_SECONDS"])

# As the module itself ends: nothing may hold up the end of the pod, and the workers end with it.
os._exit(sft_trainer.launch.main())
