"""kopf, here and nowhere else: login, signals and the life of the process.

It watches nothing: a handler of events costs a task for every object, and time for every event, also for what the
operator itself has just written, which an informer drops by its version.
"""

import logging
import socket
from typing import Any

import kopf

from .client import connect


def _registry() -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        access = await connect()
        return kopf.AiohttpSession(server=access.server, aiohttp_session=access.session)

    return registry


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # No right to read CRDs or namespaces is needed.
    settings.scanning.disabled = True
    return settings


async def live(namespace: str | None) -> None:
    """Until the process is asked to end (kopf takes SIGTERM and SIGINT)."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    await kopf.operator(
        registry=_registry(),
        settings=_settings(),
        standalone=True,
        # kopf's own choice asks for the name of the user, which a container's numeric user does not have.
        identity=socket.gethostname(),  # type: ignore[arg-type]
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace else [],
    )
