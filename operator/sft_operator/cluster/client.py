"""The API server: untyped requests over one HTTP session. Bodies are dicts as they travel.

Typed clients check every body against generated models, at twice the processor time and 100 MB more; the API
server checks them anyway.
"""

import asyncio
import logging
import os
import re
import ssl
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

import aiohttp

from sft_api.v1alpha1 import GROUP, KIND, PLURAL, VERSION

from ..picture.observed import Manifest
from ..picture.untrusted import integer, part, text
from .json_text import read, read_object, written
from .list_body import ListBody
from .requests import Answer, Requests
from .server_clock import ServerClock
from .watch_body import Event, WatchBody

logger = logging.getLogger(__name__)

_PATHS = {
    KIND: (f"apis/{GROUP}/{VERSION}", PLURAL),
    "Job": ("apis/batch/v1", "jobs"),
    "Pod": ("api/v1", "pods"),
    "ConfigMap": ("api/v1", "configmaps"),
    "Service": ("api/v1", "services"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "Namespace": ("api/v1", "namespaces"),
    "CoreEvent": ("api/v1", "events"),
    "Event": ("apis/events.k8s.io/v1", "events"),
    "Lease": ("apis/coordination.k8s.io/v1", "leases"),
    # Of Kubernetes 1.37, where its feature gate GenericWorkload is on.
    "PodGroup": ("apis/scheduling.k8s.io/v1beta1", "podgroups"),
    # Kueue up to 0.14 serves the second only; from 0.16 on it is deprecated, and some releases refuse its patches.
    "Workload/v1beta2": ("apis/kueue.x-k8s.io/v1beta2", "workloads"),
    "Workload/v1beta1": ("apis/kueue.x-k8s.io/v1beta1", "workloads"),
}

REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
LIST_TIMEOUT = aiohttp.ClientTimeout(total=300, sock_connect=5, sock_read=30)
"""A page of the largest objects that there can be takes long, and is read as it comes."""
LIST_CHUNK = 500
_BACKLOG_BYTES = 2**15
"""Read in one go of a watch that takes breath, they say that more is on its way. A breath of 0.1 s after each read lets
4 MB a second in and no more: one tenant can write as much, and the watch would never catch up."""
_LONGEST_ASKED_PAUSE = 120.0
"""A proxy that says for how many hours it is worked on would have jobs wait as long after the server is back."""
_DENIED = re.compile(r"\bdenied (the )?request\b")
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class ApiError(Exception):
    """The API server said no."""

    def __init__(self, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = None if retry_after is None else min(_LONGEST_ASKED_PAUSE, retry_after)
        """Seconds the server asks to wait, two minutes at most."""

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed a little later: overload, a conflict, a server that restarts."""
        return self.code in (408, 409, 429) or self.code >= 500

    @property
    def denied(self) -> bool:
        """Whether a webhook or a policy has said no, with whatever code its author has chosen."""
        return self.code < 500 and _DENIED.search(self.message) is not None

    @property
    def of_webhook(self) -> bool:
        """Whether a webhook did not answer: that lasts until someone brings it back, and nothing may wait for it."""
        return self.code >= 500 and "webhook" in self.message


UNREACHABLE = (aiohttp.ClientError, TimeoutError)
"""What a request raises that has no answer."""
REQUEST_ERRORS = (ApiError, *UNREACHABLE)
"""What a request raises that was not done, as far as is known."""


class Cluster:
    """Requests of one kind of object by namespace and name. Raises ``REQUEST_ERRORS``."""

    def __init__(
        self,
        server: str,
        session: aiohttp.ClientSession,
        on_answer: Callable[[str, str, int], None] = lambda verb, kind, code: None,
        requests: Requests | None = None,
    ) -> None:
        """``on_answer`` is called with verb, kind and status code of every answer.

        Short requests go by ``requests``, or by the session like lists and watches.
        """
        self.server = server.rstrip("/")
        self.session = session
        self._requests = requests
        self._on_answer = on_answer
        self._clock = ServerClock()

    def now(self) -> datetime:
        """The time by the clock of the API server, by which it writes the times of objects."""
        return self._clock.now()

    async def get(self, kind: str, namespace: str | None, name: str, *, whole: bool = False) -> Manifest:
        """One object: at least what is read of it, or the ``whole``."""
        return await self._request("get", kind, "GET", self._url(kind, namespace, name), is_whole=whole)

    async def list(
        self, kind: str, namespace: str | None, *, labels: str = "", fields: str = "", at_most: int | None = None
    ) -> tuple[list[Manifest], int]:
        """All objects (or ``at_most`` so many), and the version at which the list was made."""
        items: list[Manifest] = []
        version = await self.scan(kind, namespace, items.append, labels=labels, fields=fields, at_most=at_most)
        return items, version

    async def scan(
        self,
        kind: str,
        namespace: str | None,
        take: Callable[[Manifest], None],
        *,
        labels: str = "",
        fields: str = "",
        at_most: int | None = None,
    ) -> int:
        """Hand all objects (or ``at_most`` so many) to ``take``, one by one as they arrive, page by page.

        Returns the version at which the list was made. The server may let a list expire between two pages: ``ApiError``
        with code 410, after which it must be begun again.
        """
        query = {"limit": str(at_most or LIST_CHUNK)}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        while True:
            body = await self._read_list(kind, f"{self._url(kind, namespace)}?{urlencode(query)}", take)
            more = text(part(body, "metadata").get("continue"))
            if at_most or not more:
                return integer(part(body, "metadata").get("resourceVersion"), highest=2**64) or 0
            query["continue"] = more

    async def _read_list(self, kind: str, url: str, take: Callable[[Manifest], None]) -> Manifest:
        """One page: all of it but its items."""
        body = ListBody()
        headers = {"Accept": "application/json"}
        async with self.session.get(url, headers=headers, timeout=LIST_TIMEOUT, allow_redirects=False) as response:
            await self._accepted("list", kind, response)
            try:
                async for data in response.content.iter_any():
                    for item in body.feed(data):
                        take(item)
                for item in body.close():
                    take(item)
            except ValueError as error:
                raise aiohttp.ClientPayloadError(str(error)) from error
        return body.fields

    async def watch(
        self,
        kind: str,
        namespace: str | None,
        take: Callable[[Event], bool],
        *,
        labels: str,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        breath: float = 0.0,
    ) -> None:
        """Hand the events of one watch to ``take``, one by one as they arrive, until it is True or the watch ends.

        For ``breath`` seconds after each read nothing is read, unless it has fallen behind: what comes in swarms is
        then read in one go.
        An error that is told inside of the stream is raised like one that is its status.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "labelSelector": labels, **query}
        url, body = f"{self._url(kind, namespace)}?{urlencode(query)}", WatchBody(kind)
        headers = {"Accept": "application/json"}
        async with self.session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
            await self._accepted("watch", kind, response)
            async for data in response.content.iter_any():
                for event in body.feed(data):
                    if event is None:
                        logger.warning("a line of the watch of %ss cannot be read", kind)
                    elif event.type == "ERROR":
                        raise _told_error(event.object)
                    elif take(event):
                        return
                connection = response.connection if breath and len(data) < _BACKLOG_BYTES else None
                protocol = connection.protocol if connection is not None else None
                if protocol is not None:
                    protocol.pause_reading()
                    await asyncio.sleep(breath)
                    protocol.resume_reading()

    async def create(self, kind: str, namespace: str, manifest: Manifest, *, whole: bool = False) -> Manifest:
        """Create, and return what the server made of it if the ``whole`` is asked for; else nothing of it is read.

        A field that the server does not know is refused, not dropped: pods would lack what an administrator's template
        gives them.
        """
        url = f"{self._url(kind, namespace)}?fieldValidation=Strict"
        accept = "application/json" if whole else _METADATA_ONLY
        return await self._request("create", kind, "POST", url, body=manifest, accept=accept, is_read=whole)

    async def patch(
        self,
        kind: str,
        namespace: str,
        name: str,
        patch: Manifest,
        *,
        subresource: str = "",
        strategic: bool = False,
    ) -> Manifest:
        """JSON merge patch, or a strategic one, which merges lists by their keys (built-in kinds only)."""
        url = self._url(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        content_type = f"application/{'strategic-merge-patch' if strategic else 'merge-patch'}+json"
        return await self._request("patch", kind, "PATCH", url, body=patch, content_type=content_type)

    async def update(self, kind: str, namespace: str, name: str, manifest: Manifest) -> Manifest:
        """Replace the object; its resourceVersion must be the present one."""
        return await self._request("update", kind, "PUT", self._url(kind, namespace, name), body=manifest)

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        *,
        uid: str,
        version: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """Delete just that object, its dependents in the background; nothing happens when it is gone, or when it is
        not of that ``version`` any more."""
        preconditions = {"uid": uid} if version is None else {"uid": uid, "resourceVersion": version}
        body: Manifest = {"propagationPolicy": "Background", "preconditions": preconditions}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            await self._request("delete", kind, "DELETE", self._url(kind, namespace, name), body=body)
        except ApiError as error:
            if error.code not in (404, 409):  # gone, or another object of the same name, or changed since
                raise

    async def evict(self, namespace: str, name: str, *, uid: str, grace_seconds: int) -> None:
        """Evict just that pod; nothing happens when it is gone. Code 429: a disruption budget forbids it."""
        options = {"preconditions": {"uid": uid}, "gracePeriodSeconds": grace_seconds}
        body: Manifest = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": options,
        }
        url = f"{self._url('Pod', namespace, name)}/eviction"
        try:
            await self._request("evict", "Pod", "POST", url, body=body, is_read=False)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def _url(self, kind: str, namespace: str | None, name: str = "") -> str:
        prefix, plural = _PATHS[kind]
        parts = [self.server, prefix, *(["namespaces", namespace] if namespace else []), plural]
        return "/".join([*parts, name] if name else parts)

    async def _request(
        self,
        verb: str,
        kind: str,
        method: str,
        url: str,
        *,
        body: Manifest | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        is_read: bool = True,
        is_whole: bool = False,
    ) -> Manifest:
        data = written(body) if body is not None else None
        if self._requests is not None:
            path = url[len(self.server) :]
            answer = await self._requests.send(method, path, content_type=content_type, accept=accept, body=data)
        else:
            headers = {"Content-Type": content_type, "Accept": accept}
            async with self.session.request(
                method, url, data=data, headers=headers, timeout=REQUEST_TIMEOUT, allow_redirects=False
            ) as response:
                told = {name.lower(): value for name, value in response.headers.items()}
                answer = Answer(response.status, told, await response.read())
        self._on_answer(verb, kind, answer.status)
        self._clock.heard(answer.headers.get("date", ""))
        if answer.status >= 300:
            raise _error(answer.status, answer.headers.get("retry-after", ""), answer.body)
        if not is_read:
            return {}
        try:
            document: Manifest = read(answer.body) if is_whole else read_object(kind, answer.body)
        except (ValueError, RecursionError) as error:
            raise aiohttp.ClientPayloadError(f"the answer is no JSON: {error}") from error
        return document

    async def _accepted(self, verb: str, kind: str, response: aiohttp.ClientResponse) -> None:
        self._on_answer(verb, kind, response.status)
        self._clock.heard(response.headers.get("Date", ""))
        if response.status >= 300:
            raise _error(response.status, response.headers.get("Retry-After", ""), await response.read())


def _error(code: int, retry: str, answer: bytes) -> ApiError:
    try:
        status = read(answer)
        reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    except (ValueError, RecursionError, AttributeError):
        reason, message = "", answer.decode(errors="replace")[:1000]
    try:
        retry_after = float(retry)
    except ValueError:
        retry_after = None
    return ApiError(code, reason, message, retry_after)


def _told_error(status: Manifest) -> ApiError:
    """The error that a Status inside of a watch tells of."""
    pause = integer(part(status, "details").get("retryAfterSeconds"))
    return ApiError(integer(status.get("code")) or 500, text(status.get("reason")), text(status.get("message")), pause)


class Access(NamedTuple):
    """How the API server is reached; ``close`` it in the end."""

    server: str
    session: aiohttp.ClientSession
    requests: Requests | None
    """For short requests; None where a proxy stands between."""

    async def close(self) -> None:
        """Close all connections."""
        if self.requests is not None:
            self.requests.close()
        await self.session.close()


async def connect() -> Access:
    """Access to the API server by the pod's service account, else the kubeconfig.

    Tokens are read again when they expire. Raises ``ConfigError`` when there is neither.
    """
    from kubernetes.aio import client, config  # heavy, and needed once

    configuration = client.Configuration()
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and not os.environ.get("KUBECONFIG")
    try:
        if in_cluster:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            # Named here: the library reads KUBECONFIG once, when it is imported.
            given = os.environ.get("KUBECONFIG")
            await config.load_kube_config(config_file=given, client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise ConfigError(f"no way to the API server: {error}; run in a cluster, or set KUBECONFIG") from error

    async def authorization() -> str | None:
        token: str | None = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return token

    async def authorize(
        request: aiohttp.ClientRequest, handler: Callable[[aiohttp.ClientRequest], Any]
    ) -> aiohttp.ClientResponse:
        if token := await authorization():
            request.headers["Authorization"] = token
        response: aiohttp.ClientResponse = await handler(request)
        return response

    context = _ssl_context(configuration)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=context, limit=100, keepalive_timeout=60),
        headers={"User-Agent": "sft-operator"},
        middlewares=(authorize,),
        proxy=configuration.proxy or None,
    )
    requests = None if configuration.proxy else Requests(configuration.host, context, authorization)
    return Access(configuration.host, session, requests)


class ConfigError(Exception):
    """There is no usable access to a cluster."""


def _ssl_context(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
