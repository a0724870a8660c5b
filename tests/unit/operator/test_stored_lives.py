"""What holds in every life of a job whose place is in the platform's store, whatever happens to both: fixed seeds."""

from __future__ import annotations

import pytest

from tests.unit.operator.stored_lives import StoredLife
from tests.unit.operator.test_lives import ENDS, NODES, USUAL, check_status, play_to_the_end

PLACES = {"delete": 12, "set_policy": 8, "set_time_to_live": 6, "make_again": 4}
STORE = {"lose_store": 8, "find_store": 12, "trouble_store": 10, "slow_store": 8, "delete_without_store": 5}
OTHERS = {"other_comes": 10, "other_may_come": 4, "other_goes": 12, "retry": 12, "make_again": 6}
CLUSTER = {"delete_namespace": 4, "use_job_quota": 5, "free_job_quota": 8, "relist": 10, "watch_again": 10}
OPERATORS = {
    "trouble": 8,
    "kill_operator": 8,
    "freeze_operator": 3,
    "replace_operator": 6,
    "restart_operator": 5,
}
LATE = {"relist": 15, "watch_again": 5, "set_policy": 15, "wait_long": 8}
KINDS = {
    "deleted with its place": {
        **USUAL,
        **PLACES,
        **LATE,
        "delete_behind_lost_node": 20,
        "slow_store": 15,
        "lose_node": 10,
        "find_node": 12,
        "freeze_operator": 5,
    },
    "deleted by its time to live": {**USUAL, **LATE, "fail": 15, "retry": 25, "set_time_to_live": 30},
    "with a store in trouble": {**USUAL, **PLACES, **STORE},
    "where others come": {**USUAL, **PLACES, **OTHERS, "lose_node": 4, "find_node": 6},
    "in a namespace that goes": {**USUAL, **PLACES, **CLUSTER},
    "all of it": {**USUAL, **ENDS, **NODES, **PLACES, **STORE, **OTHERS, **CLUSTER, **OPERATORS},
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_to_a_job_and_its_place_what_is_to_stay_stays_and_all_else_goes(kind: str, seed: int) -> None:
    play_to_the_end(StoredLife(seed, KINDS[kind], on_status=check_status))
