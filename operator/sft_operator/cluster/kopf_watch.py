"""kopf, here and nowhere else: it watches SFTJobs, and every event becomes "take this in, and look again".

Only an event handler is used: it needs no finalizers and leaves no annotations. kopf watches again by itself when
a stream breaks or falls silent; what was deleted meanwhile it cannot know, a complete listing finds that.
"""

import logging
import random
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import kopf

from sft_api.v1alpha1 import GROUP, KIND, PLURAL, VERSION

from ..config import Settings
from .client import connect
from .informer import Seen


class _PatientRetries:
    """Seconds between retries, for ever: an API server that is away is no reason to end."""

    def __iter__(self) -> Iterator[float]:
        pause = 1.0
        while True:
            yield pause * random.uniform(0.75, 1.25)  # noqa: S311 -- not for secrets
            pause = min(30.0, 2 * pause)


class _NoMemory(kopf.DiffBaseStorage):
    """kopf compares objects with copies of themselves for handlers that we do not have."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        return None


async def _list_again(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A list that expired between two pages breaks off, and is begun again; kopf would end the process."""
    response = await handler(request)
    if response.status == 410 and "continue" in request.url.query:
        response.close()
        raise aiohttp.ClientPayloadError(f"the list expired: {request.url.path}")
    return response


def _registry(seen: Seen) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        server, session = await connect(_list_again)
        return kopf.AiohttpSession(server=server, aiohttp_session=session)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def sft_job(event: Any, **_: Any) -> None:
        seen(KIND, event["type"], event["object"])

    return registry


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # Kinds are looked up once, at the start: no right to read CRDs or namespaces is needed.
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NoMemory()
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = 75
    # A page is held as a whole, and an object may have 1.5 MiB, which is six times as much as dicts.
    settings.watching.chunk_size = 20
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.networking.error_backoffs = _PatientRetries()
    settings.networking.enforce_retry_after = True
    return settings


async def watch(settings: Settings, seen: Seen) -> None:
    """Watch SFTJobs until the process is asked to end (kopf takes SIGTERM and SIGINT)."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    await kopf.operator(
        registry=_registry(seen),
        settings=_kopf_settings(),
        standalone=True,
        # kopf's own choice asks for the name of the user, which a container's numeric user does not have.
        identity=socket.gethostname(),  # type: ignore[arg-type]
        clusterwide=settings.namespace is None,
        namespaces=[settings.namespace] if settings.namespace else [],
    )
