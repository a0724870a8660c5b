"""Reports come from code of tenants: nothing that they answer can do harm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from sft_api.failures import FailureClass
from sft_api.progress import Phase, Progress
from sft_api.report import progress_status
from sft_operator.cluster import progress_client
from sft_operator.cluster.progress_client import (
    MAX_BYTES,
    ProgressClient,
    UnusableReport,
    parse_report,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def pod(handler: Handler) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://{{address}}:{port}/v1/progress"
    finally:
        await runner.cleanup()


def read_from(handler: Handler) -> Progress:
    async def scenario() -> Progress:
        async with pod(handler) as url:
            client = ProgressClient(url, concurrency=2)
            try:
                return await client.read(address="127.0.0.1", namespace="team", name="tulu", job_uid="u", pod_uid="p")
            finally:
                await client.close()

    return asyncio.run(scenario())


def test_a_report_is_read() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/v1/progress"
        assert "Authorization" not in request.headers
        return web.json_response({"jobUid": "u", "training": {"step": 3, "attempt": 1}})

    progress = read_from(answer)

    assert (progress.job_uid, progress.training.step) == ("u", 3)


@pytest.mark.parametrize(
    ("answered", "who"),
    [
        # A pod's address is another job's a moment after the pod has gone; an answer that names no job is nobody's.
        ({"jobUid": "another"}, r"SFTJob 'another', pod ''"),
        ({}, "SFTJob ''"),
        # The same SFTJob, but the pod of another Job or index.
        ({"jobUid": "u", "podUid": "another"}, r"SFTJob 'u', pod 'another'"),
    ],
)
def test_an_answer_of_another_run_is_not_taken_and_the_connection_closed(answered: dict[str, str], who: str) -> None:
    connections: list[asyncio.Transport | None] = []

    async def answer(request: web.Request) -> web.Response:
        connections.append(request.transport)
        return web.json_response({**answered, "training": {"step": 3}})

    with pytest.raises(UnusableReport, match=f"answered for {who}"):
        read_from(answer)
    [connection] = connections
    assert connection is None or connection.is_closing()


Reports = Callable[[ProgressClient], Awaitable[None]]


def with_client(answer: Callable[[web.Request], dict[str, Any]], scenario: Reports) -> list[int]:
    """The port from which each request came that ``scenario`` made."""
    ports: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.json_response(answer(request))

    async def run() -> None:
        async with pod(handler) as url:
            client = ProgressClient(url.replace("/v1", "/{name}/v1"), concurrency=2)
            try:
                await scenario(client)
            finally:
                await client.close()

    asyncio.run(run())
    return ports


async def ask(client: ProgressClient, name: str = "tulu", pod_uid: str = "p") -> Progress:
    return await client.read(address="127.0.0.1", namespace="team", name=name, job_uid="u", pod_uid=pod_uid)


def test_a_pod_that_is_asked_again_and_again_keeps_its_connection() -> None:
    steps = iter((1, 2, 2, 3))
    read: list[Progress] = []

    async def scenario(client: ProgressClient) -> None:
        read.extend([await ask(client) for _ in range(4)])

    ports = with_client(lambda _: {"jobUid": "u", "training": {"step": next(steps), "updateTime": 0}}, scenario)

    assert len(set(ports[1:])) == 1, "one connection from the second time on"
    assert [progress.training.step for progress in read] == [1, 2, 2, 3]
    assert read[1] is read[2], "the very same report is not parsed again"


def test_connections_are_kept_to_those_that_were_asked_last_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_client, "KEPT_PODS", 3)

    async def in_turn(client: ProgressClient, pods: int) -> None:
        for _ in range(3):
            for number in range(pods):
                await ask(client, f"job-{number}")

    few = with_client(lambda _: {"jobUid": "u"}, lambda client: in_turn(client, 3))
    many = with_client(lambda _: {"jobUid": "u"}, lambda client: in_turn(client, 4))

    assert len(set(few[3:])) < 6, "kept"
    assert len(set(many)) == 12, "each closed after its answer"


def test_who_answers_is_looked_at_on_a_kept_connection_too() -> None:
    pods = iter(("p", "p", "another", "p", "p"))

    async def scenario(client: ProgressClient) -> None:
        await ask(client)
        await ask(client)
        with pytest.raises(UnusableReport, match="pod 'another'"):
            await ask(client)
        await ask(client)
        # The report of the pod that was there before is not taken for that of its successor.
        with pytest.raises(UnusableReport, match="pod 'p'"):
            await ask(client, pod_uid="q")

    ports = with_client(lambda _: {"jobUid": "u", "podUid": next(pods)}, scenario)

    assert ports[1] == ports[2] != ports[3]


def test_pods_that_take_long_wait_for_one_another_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 pods of one tenant that answered after 3.9 seconds held the reports of all others up."""
    monkeypatch.setattr(progress_client, "_SLOW_SECONDS", 0.05)
    waiting, most, let_go = 0, 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal waiting, most
        if "slow" in request.path:
            waiting += 1
            most = max(most, waiting)
            await (let_go.wait() if known else asyncio.sleep(0.1))
            waiting -= 1
        return web.json_response({"jobUid": "u"})

    known = False

    async def scenario() -> None:
        nonlocal known, most
        async with pod(answer) as url:
            client = ProgressClient(url.replace("/v1", "/{name}/v1"), concurrency=8)
            try:
                await asyncio.gather(*(ask(client, f"slow-{number}") for number in range(8)))
                known, most = True, 0
                held = [asyncio.create_task(ask(client, f"slow-{number}")) for number in range(8)]
                # While none of the slow ones has an answer.
                for number in range(20):
                    await ask(client, f"quick-{number}")
                assert waiting == most == 4, "half of all"
                let_go.set()
                await asyncio.gather(*held)
            finally:
                await client.close()

    asyncio.run(scenario())


def test_a_trainer_of_before_pods_told_their_uid_is_known_by_its_job() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"jobUid": "u"})

    assert read_from(answer).pod_uid == ""

    async def new(request: web.Request) -> web.Response:
        return web.json_response({"jobUid": "u", "podUid": "p"})

    assert read_from(new).pod_uid == "p"


def test_redirects_are_not_followed() -> None:
    async def answer(request: web.Request) -> web.Response:
        raise web.HTTPFound("http://169.254.169.254/latest/meta-data")

    with pytest.raises(UnusableReport, match="answered 302"):
        read_from(answer)


def test_an_endless_answer_is_cut() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(MAX_BYTES // 1024 + 70):
            await response.write(b" " * 1024)
        return response

    with pytest.raises(UnusableReport, match="larger than"):
        read_from(answer)


def test_who_says_again_and_again_that_his_answer_comes_is_heard_once() -> None:
    """One such pod had half of the operator's processor time, and sixteen held all else up for seconds."""
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            while not writer.is_closing():
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
                sent += 1
                await writer.drain()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        client = ProgressClient(f"http://{{address}}:{server.sockets[0].getsockname()[1]}/", concurrency=1)
        try:
            await client.read(address="127.0.0.1", namespace="n", name="n", job_uid="u", pod_uid="p")
        finally:
            await client.close()
            server.close()

    with pytest.raises(UnusableReport, match="no HTTP"):
        asyncio.run(scenario())
    assert sent < 1000


def test_nobody_there_is_an_answer_too() -> None:
    async def scenario() -> None:
        client = ProgressClient("http://{address}:1/", concurrency=1)
        try:
            await client.read(address="127.0.0.1", namespace="n", name="n", job_uid="u", pod_uid="p")
        finally:
            await client.close()

    with pytest.raises(UnusableReport, match=r"127\.0\.0\.1:1"):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"[" * 100_000,
        b'{"training": {"step": "many"}}',
        b'{"training": {"phase": 7}}',
        json.dumps({"incidents": [{}] * 101}).encode(),
        b"\xff\xfe",
    ],
)
def test_rubbish_is_refused(body: bytes) -> None:
    with pytest.raises(UnusableReport):
        parse_report(body)


def test_what_only_a_newer_trainer_knows_takes_nothing_else_with_it() -> None:
    """After a rollback of the operator, and with newer images of users: steps, checkpoints and failures are told on."""
    checkpoint = {"step": 4, "attempt": 1, "uri": "s3://b/4", "time": "2026-01-01T00:00:00Z", "sizeBytes": 1}
    report = {
        "training": {
            "step": 7,
            "phase": "Invented",
            "checkpoints": {"latest": {**checkpoint, "verified": True, "invented": 1}, "invented": 1},
            "export": {"uri": "s3://b/export", "step": 4, "invented": 1},
        },
        "incidents": [{"id": "a", "time": "2026-01-01T00:00:00Z", "failure": "Invented", "message": "m"}],
        "spent": {"steps": 2.0, "invented": 1.0},
    }

    progress = parse_report(json.dumps(report).encode())

    assert (progress.training.step, progress.training.phase) == (7, Phase.WAITING)
    assert progress.training.checkpoints.latest is not None
    assert progress.training.export is not None
    assert [(item.failure, item.message) for item in progress.incidents] == [(FailureClass.UNKNOWN, "m")]
    assert progress.spent is not None
    assert progress.spent.steps == 2.0


def test_figures_that_fit_no_status_become_none_or_are_cut() -> None:
    body = b'{"training": {"loss": NaN, "gradNorm": Infinity, "learningRate": 1e999, "tokensSeen": ' + b"9" * 24 + b"}}"

    training = parse_report(body).training

    assert (training.loss, training.grad_norm, training.learning_rate) == (None, None, None)
    assert training.tokens_seen == 2**63 - 1
    assert json.loads(progress_status(training).model_dump_json(by_alias=True))["loss"] is None


def test_times_get_a_time_zone_and_checkpoints_without_a_time_are_dropped() -> None:
    def checkpoint(time: str) -> dict[str, Any]:
        return {"step": 1, "attempt": 1, "uri": "s3://b/1", "time": time, "sizeBytes": 1, "verified": True}

    report = {
        "training": {
            "updateTime": "2026-01-01T00:00:00",
            "checkpoints": {
                "latest": checkpoint("yesterday"),
                "kept": [checkpoint("2026-01-01T01:00:00+01:00"), checkpoint("")],
            },
        },
        "incidents": [{"id": "x" * 500, "time": "2026-01-01T00:00:00", "failure": "Hang", "message": "m"}],
    }

    progress = parse_report(json.dumps(report).encode())

    assert progress.training.update_time.tzinfo is not None
    assert progress.training.checkpoints.latest is None
    assert [item.time for item in progress.training.checkpoints.kept] == ["2026-01-01T00:00:00Z"]
    assert progress.incidents[0].time.tzinfo is not None
    assert len(progress.incidents[0].id) == 100


def test_of_a_report_no_more_is_kept_than_a_status_shows() -> None:
    """That of each job is: a hundred pods whose reports took megabytes each would end the operator."""
    many = {f"{number:x}": 1 for number in range(10_000)}
    told = {"evalLosses": many, "evalAccuracies": many, "warnings": [*many, "a" * 5000], "phaseDetail": "a" * 9000}
    body = json.dumps({"training": told}, separators=(",", ":")).encode()
    assert len(body) < MAX_BYTES
    parse_report(b"{}")

    tracemalloc.start()
    training = parse_report(body).training
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert (len(training.warnings), len(training.warnings[-1]), training.eval_losses) == (20, 1000, {})
    assert len(training.phase_detail) == 1000
    assert held < 50_000


def test_of_a_report_in_which_all_is_wrong_not_all_is_told() -> None:
    """The list of a hundred thousand errors took half a second, in which the operator did nothing else."""
    with pytest.raises(UnusableReport) as caught:
        parse_report(b'{"training":{"warnings":[' + b",".join([b"0"] * 100_000) + b"]}}")

    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() == 1
