"""Who belongs to a group: tokens, versions, and what a member takes for an answer of its index 0."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sft_trainer.supervisor.clock import AwakeClock
from sft_trainer.supervisor.coordinator import Coordinator
from sft_trainer.supervisor.http import Request, Response, serve
from sft_trainer.supervisor.identity import code_version, digest_of, group_token, mismatch
from sft_trainer.supervisor.link import Link
from sft_trainer.supervisor.output import Output
from sft_trainer.supervisor.protocol import Order, OrderKind, Report
from tests.unit.supervisor.test_environment import SETTINGS
from tests.waiting import PATIENCE_SECONDS


def test_a_token_is_that_of_one_job_of_one_sftjob() -> None:
    mine = group_token("sftjob", {"SFT_GROUP_UID": "job"})
    assert mine == group_token("sftjob", {"SFT_GROUP_UID": "job", "PATH": "/bin"})
    others = {
        group_token("sftjob", {"SFT_GROUP_UID": "the next job"}),
        group_token("another", {"SFT_GROUP_UID": "job"}),
        group_token("sftjob", {}),
    }
    assert len({mine, *others}) == 4
    assert "job" not in mine


def test_a_version_changes_with_any_file_of_the_code(tmp_path: Path) -> None:
    for name, content in (("a.py", "x = 1"), ("data/b.py", "y = 2"), ("notes.txt", "no code")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    before = digest_of([tmp_path])
    (tmp_path / "notes.txt").write_text("other words")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("compiled")
    assert digest_of([tmp_path]) == before
    (tmp_path / "data" / "b.py").write_text("y = 3")
    changed = digest_of([tmp_path])
    (tmp_path / "data" / "b.py").rename(tmp_path / "data" / "c.py")
    assert len({before, changed, digest_of([tmp_path])}) == 3
    assert len(code_version()) == 12


def test_the_sentence_names_both_versions_and_what_to_do() -> None:
    assert mismatch({}, "aaa") == ""
    assert mismatch({1: "bbb"}, "aaa").startswith(
        "the pods do not run the same trainer: pod 0 has version aaa; pod 1 has version bbb: the image has changed "
        "under its tag. Delete the pods with the older one"
    )
    many = mismatch({node: "bbb" if node % 2 else "" for node in range(1, 4096)}, "aaa")
    assert "pods 1, 3, 5, 7, 9, 11, 13, 15, 17, 19 and 2038 more have version bbb; pods 2, 4" in many
    assert "have version unknown" in many
    assert len(many) < 2000


@pytest.mark.parametrize("token", ["", "of another run", "of änother one"])
def test_an_order_without_the_tokens_of_the_group_is_not_taken(token: str, capfd: pytest.CaptureFixture[str]) -> None:
    connections: list[bool] = []
    orders: list[Order] = []

    async def index_0(request: Request) -> Response:
        assert json.loads(request.body)["token"] == "ours"
        given = "ours" if connections else token
        return Response(200, Order(id="1", token=given, kind=OrderKind.EXIT).model_dump_json().encode())

    async def scenario() -> None:
        async with await serve("127.0.0.1", 0, index_0) as server:
            port = server.sockets[0].getsockname()[1]
            settings = replace(SETTINGS, coordinator="127.0.0.1", port=port, token="ours", version="aaa")
            output = Output()
            link = Link(settings, output=output, clock=AwakeClock())
            real = link._client.close

            def closed() -> None:
                connections.append(link._client._streams is not None)
                real()

            link._client.close = closed  # type: ignore[method-assign]
            link.offer(Report(job_uid="uid", token="ours", node=2, processes=1, instance="i"))
            task = asyncio.create_task(link.run(orders.append))
            end = time.monotonic() + PATIENCE_SECONDS
            while not orders and time.monotonic() < end:
                await asyncio.sleep(0.01)
            task.cancel()
            output.flush(PATIENCE_SECONDS)

    asyncio.run(scenario())

    # Cut off, so that the name is looked up again; then the right one answers.
    assert connections[0] is True
    assert {order.token for order in orders} == {"ours"}
    said = capfd.readouterr().err
    assert ("it answers for another run" if token else "pod 0 has version unknown") in said
    assert not token or token not in said.replace("it answers for another run", "")


@pytest.mark.parametrize(
    ("stranger", "answer"),
    [
        ({"job_uid": "another"}, "this is the group of job 'uid', not 'another'"),
        ({"token": "of the next job"}, "this is another run of job 'uid'"),
        ({"token": "of änother one"}, "this is another run of job 'uid'"),
        ({"token": "of the next job", "version": "bbb"}, "this is another run of job 'uid'"),
        # Nobody is believed to replace a pod who does not show the token.
        ({"token": "", "version": "bbb"}, "pod 0 has version aaa; pod 1 has version bbb"),
        ({"token": ""}, "does not fit"),
        ({"node": 3}, "does not fit"),
        ({"node": 2**60, "version": "bbb"}, "does not fit"),
    ],
)
def test_strangers_are_refused_and_change_nothing(tmp_path: Path, stranger: dict[str, object], answer: str) -> None:
    settings = replace(SETTINGS, node=0, processes=1, run_dir=tmp_path, token="ours", version="aaa")
    ours = Report(job_uid="uid", token="ours", version="aaa", node=1, processes=1, instance="ours")

    async def scenario() -> None:
        coordinator = Coordinator(settings, instance="zero", output=Output(), clock=AwakeClock())
        assert (await coordinator.exchange(ours.model_dump_json().encode())).status == 200
        report = ours.model_copy(update={"instance": "stranger", **stranger})
        response = await coordinator.exchange(report.model_dump_json().encode())
        assert (response.status, response.close) == (409, True)
        assert answer in response.body.decode()
        assert "ours" not in response.body.decode()
        assert coordinator.group.members[1].report == ours

    asyncio.run(scenario())
