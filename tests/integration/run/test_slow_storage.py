"""Storage that takes long: training goes on, nothing is taken for a hang, and nothing is lost."""

from tests.cluster.object_store import ObjectStore
from tests.integration.run.runs import Place
from tests.integration.run.slow_network import gate
from tests.integration.run.stores import credentials, s3_spec

BUCKET = "slow-storage"


def test_an_upload_that_outlasts_the_deadline_for_a_step_costs_nothing(place: Place, versitygw: ObjectStore) -> None:
    # Given a first checkpoint whose upload does not end, and a second one due soon after
    versitygw.client().create_bucket(Bucket=BUCKET)
    with gate(versitygw.endpoint) as way:
        job = place.job(
            training={"steps": 12, "globalBatchTokens": 512},
            checkpoint={
                "uri": f"s3://{BUCKET}/run",
                "s3": {**s3_spec(versitygw), "endpoint": way.endpoint},
                "everySteps": 2,
            },
            runPolicy={"progressDeadlineSeconds": 12},
        )
        process = place.start(job, **credentials(versitygw))

        def waits_for_the_upload() -> bool:
            progress = place.reported()
            return way.held.is_set() and progress.get("phase") == "Saving" and progress["step"] == 12

        # When training has come to its end meanwhile, and the network is back
        place.wait_until(waits_for_the_upload)
        way.open.set()
        ended = place.finish(process)

    # Then the group was never ended, and the last step is saved
    assert ended.code == 0, ended.said
    assert "restarts" not in ended.status
    assert (ended.status["attempt"], ended.latest) == (1, 12)
