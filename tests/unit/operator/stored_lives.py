"""Lives of a job whose place is in the platform's store: it may go with the job, others may come there, the namespace
may go, and operators of other versions may look after it. Seeded, as ``lives``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sft_api.deletion import DELETES
from sft_api.v1alpha1.job import RETRY_ANNOTATION
from sft_operator.config import NetworkPolicySettings, PodSettings
from sft_operator.names import PLACE_FINALIZER
from tests.unit.operator.lives import Life
from tests.unit.operator.make import Object
from tests.unit.operator.played.cluster import Violation
from tests.unit.operator.played.controllers import NamespaceController
from tests.unit.operator.played.store import PLACE, STORE, PlayedStore
from tests.unit.operator.played.training import StoredTraining, Training
from tests.unit.operator.played.writing import Writer
from tests.unit.operator.test_reconciler import KEY, SETTINGS

_OF_USERS = {"notes.txt": "of a user", "export/config.json": "of a user", "checkpoints/mine/a": "of a user"}
_LONGEST_SECONDS = 2400.0
"""In which what is deleted is gone, whatever the store does."""
_TOLD_SECONDS = 40.0
_OTHERS_STEPS = 7


@dataclass
class StoredLife(Life):
    """One cluster, and the store of its platform."""

    def __post_init__(self) -> None:
        self.others: list[Writer] = []
        self._their_steps = 0
        self._next_step = 0.0
        self._came = 0
        self._left = ""
        """Uid of an SFTJob whose children are to stay."""
        self._bare_since: float | None = None
        """Since when its place would not go with it, as asked."""
        self.comes_between = False
        """Somebody takes the place over between two requests of the operator."""
        self.is_gone_for_long = False
        self.words: dict[str, str] = {}
        """By which others are asked to take the place over."""
        self._last: Object | None = None
        self._removed: set[str] = set()
        self.is_excused = False
        """Something happened to the SFTJob for which its place may stay."""
        super().__post_init__()
        self.namespace = NamespaceController(self.story, self.api)
        self.api.on_deletion = self._look_at_deletion

    def new_training(self) -> Training:
        self.store = PlayedStore(self.story)
        self.store.meanwhile = self._come_between
        self.store.on_removal = self._look_at_removal
        for key, by in _OF_USERS.items():
            self.store.put(key, b"theirs", by)
        self.store.protected.add("of a user")
        self.trained = StoredTraining(self.story, self.api, self.nodes, self.store)
        return self.trained

    @property
    def the_store(self) -> PlayedStore:
        assert self.store is not None
        return self.store

    def spec(self) -> Object:
        policy = self.random.choice(["Delete", "Delete", "Keep"])
        self.is_excused = False
        return {"checkpoint": {"uri": PLACE}, "deletionPolicy": policy}

    # What goes on

    def step(self) -> None:
        self.namespace.step()
        self._train_elsewhere()
        job = self.api.find("SFTJob")
        last, self._last = self._last, job
        if last and (job is None or job["metadata"]["uid"] != last["metadata"]["uid"]):
            self._look_at_place(last)
        self._look_for_finalizer(job)
        if self.the_store.went_wrong:
            self.is_excused, self.the_store.went_wrong = True, False

    def _look_for_finalizer(self, job: Object | None) -> None:
        """Where the place is to go with the job, that is soon seen to."""
        metadata = job["metadata"] if job else {}
        bare = (
            job and job["spec"]["deletionPolicy"] == "Delete" and PLACE_FINALIZER not in metadata.get("finalizers", ())
        )
        if not bare or "deletionTimestamp" in metadata or self.counts.absences:
            self._bare_since = None
        elif self._bare_since is None:
            self._bare_since = self.story.seconds
        elif self.story.seconds > self._bare_since + _TOLD_SECONDS:
            raise Violation("What is to be removed with a job is not lost with it. But it has no finalizer.")

    def _train_elsewhere(self) -> None:
        """Others save now and then, and look whether the place is theirs still."""
        for other in list(self.others):
            if not other.attempt:
                self._let_enter(other)
            elif (found := other.look()) != "ours":
                self.story.tell(f"{other.uid} finds its place {found}, and ends")
                self._end(other)
            elif self.story.seconds >= self._next_step and self._their_steps < _OTHERS_STEPS:
                self._next_step = self.story.seconds + 15
                self._their_steps += other.save(max(other.saved(), 10) + 1)

    def _let_enter(self, other: Writer) -> None:
        found = other.enter(self.words.pop(other.uid, "") if not other.attempt else "")
        if found == "entered":
            self.story.tell(f"{other.uid} claims attempt {other.attempt}")
            self._next_step = self.story.seconds
            self.is_excused = True
        elif found != "waits":
            self.story.tell(f"{other.uid} does not start: {found}")
            self._end(other)

    def _end(self, other: Writer) -> None:
        self.others.remove(other)

    def _look_at_place(self, last: Object) -> None:
        """Of an SFTJob that has gone, what is left there, and whether anybody was told so."""
        uid, metadata = last["metadata"]["uid"], last["metadata"]
        told = self.api.events
        left = [key for key, found in self.the_store.objects.items() if found.by in (uid, f"removal-of-{uid}")]
        claim = self._newest_claim()
        if told["PlaceRemoved"]:
            self._removed.add(uid)
            whole = [key for key, found in self.the_store.objects.items() if found.by != "of a user"]
            if whole and not self.is_excused:
                raise Violation(f"Of a place that was removed nothing is left. But {whole} are.")
        asked = last["spec"].get("deletionPolicy") == "Delete" and PLACE_FINALIZER in metadata.get("finalizers", ())
        deaf = self.is_excused or self.counts.absences or self.api.is_terminating
        if asked and left and claim in (uid, f"removal-of-{uid}") and not deaf and not told["PlaceKept"]:
            raise Violation(f"What stays is told of. But {left} are there, and {dict(told)} were told.")
        if asked and not deaf and not told.keys() & {"PlaceRemoved", "PlaceEmpty", "PlaceKept"}:
            raise Violation(f"What became of a place is told. But {dict(told)} were.")
        if asked and told["PlaceKept"] and not deaf and claim == uid:
            raise Violation(f"A place of one's own goes. But {left} are there.")

    def _look_at_removal(self, key: str) -> None:
        """Only of what goes, and as its user has it now."""
        job = self.api.find("SFTJob")
        if job is None or "deletionTimestamp" not in job["metadata"] or job["spec"]["deletionPolicy"] != "Delete":
            raise Violation(f"What is to stay stays. But {key} is removed of {job and job['spec']}.")
        uid, holder = job["metadata"]["uid"], self.the_store.holder
        if holder.startswith("other") or (holder != uid and self.the_store.below("checkpoints/step")):
            raise Violation(f"Nothing is removed of what another one holds. But {key} of {holder} is.")
        if self._left == uid and self.api.find("Job"):
            raise Violation(f"What is left behind keeps its place. But {key} is removed.")
        living = [pod.name for pod in self.nodes.pods if pod.phase == "Running" and not self.nodes.is_lost(pod)]
        if living:
            raise Violation(f"Nothing is removed while pods live that write there. But {living} do.")

    def _look_at_deletion(self, job: Object) -> None:
        """An operator deletes what has ended, as its user has it now."""
        asked = job["metadata"].get("annotations", {}).get(RETRY_ANNOTATION)
        begins = job["status"].get("state") == "Failed" and job["status"].get("retried") != asked
        if _ttl(job) is None or begins or "completionTime" not in job["status"]:
            raise Violation(f"What is asked for goes on. But it is deleted: {asked}, {_ttl(job)}, {job['status']}.")
        loses = PLACE_FINALIZER not in job["metadata"].get("finalizers", ())
        if job["spec"]["deletionPolicy"] == "Delete" and loses and not self.is_excused:
            raise Violation("What is to be removed with a job is not lost with it. But the job is deleted.")

    def _newest_claim(self) -> str | None:
        reader = Writer(self.story, self.the_store, "", "")
        claim = reader.claim(reader.newest())
        return claim.job_uid if claim else None

    def _come_between(self) -> None:
        """Between two requests of the operator, somebody who takes over."""
        if self.comes_between and self.random.random() < 0.2:
            self.comes_between = False
            self.other_comes(at_once=True)

    def set_right(self) -> None:
        self.the_store.is_away, self.the_store.troubles, self.comes_between = False, 0, False
        self.the_store.seconds_each = 0.0
        for other in list(self.others):
            other.say_ended("it was asked to")
            self._end(other)
        self.settle_operator()
        super().set_right()
        while (
            (job := self.api.find("SFTJob")) is None or "deletionTimestamp" in job["metadata"] or _ttl(job) is not None
        ):
            self.pass_time(1)
            if job is None:
                self.make()
            else:
                self._edit(runPolicy={"ttlSecondsAfterFinished": None})
        self.pass_time(70)
        left = [key for key, found in self.the_store.objects.items() if found.by in self._removed]
        if left:
            raise Violation(f"Of a place that was removed nothing is left later. But {left} are.")

    # What happens

    def _edit(self, **spec: Any) -> None:
        if self.api.find("SFTJob"):
            super()._edit(**spec)

    def retry(self) -> None:
        if self.api.find("SFTJob"):
            super().retry()

    def delete(self) -> None:
        self._delete_as(self.random.choice(["", "", "foregroundDeletion", "orphan"]))

    def _delete_undisturbed(self) -> None:
        """With its place, while nothing else happens."""
        self._edit(deletionPolicy="Delete")
        self.pass_time(3)
        happenings, self.happenings = self.happenings, {}
        self._delete_as("")
        self.happenings = happenings

    def _delete_as(self, how: str) -> None:
        """As the API server does: with the finalizers that are there."""
        job = self.api.find("SFTJob")
        if job is None or "deletionTimestamp" in job["metadata"]:
            return
        finalizers = [*job["metadata"].get("finalizers", ()), *([how] if how else [])]
        self.story.tell(f"SFTJob is deleted, {finalizers}")
        uid = job["metadata"]["uid"]
        if how == "orphan":
            self.is_excused, self._left = True, uid
        if finalizers:
            metadata = {"deletionTimestamp": self.story.now(), "finalizers": finalizers}
            self.api.change("SFTJob", KEY.name, {"metadata": metadata})
        else:
            self.api.remove("SFTJob")
        self._wait_until_gone(uid)
        if how == "orphan":
            for kind, name in [key for key in self.api.objects if key[0] not in ("Pod", "SFTJob")]:
                self.api.delete(kind, name)

    def _wait_until_gone(self, uid: str) -> None:
        """Whatever happens meanwhile: also operators that go, and others that come."""
        since, end, clear = self.story.seconds, self.story.seconds + _LONGEST_SECONDS, self.story.seconds + 900
        meanwhile = [name for name in _WHILE_IT_GOES if name in self.happenings]
        while (job := self.api.find("SFTJob")) and job["metadata"]["uid"] == uid:
            if self.story.seconds > end:
                raise Violation(f"What is deleted goes. But the SFTJob does not: {self.status.get('message')}")
            if meanwhile and self.random.random() < 0.15 and self.story.seconds < clear:
                name = self.random.choice(meanwhile)
                self.happened.add(name)
                getattr(self, name)()
            self._look_for_words(job, since)
            if self.story.seconds >= clear:
                self.api.refuses_jobs = False
                self.end_troubles()
            self.pass_time(self.random.choice([0.5, 5]))
        self.pass_time(3)
        children = [key for key, manifest in self.api.objects.items() if key[0] != "Pod" and self._is_of(manifest, uid)]
        if children and not self.api.is_terminating:
            raise Violation(f"Of what is deleted nothing stays. But {children} do.")

    def _look_for_words(self, job: Object, since: float) -> None:
        """Who waits for it is told what for."""
        waits = PLACE_FINALIZER in job["metadata"]["finalizers"] and "orphan" not in job["metadata"]["finalizers"]
        deaf = self.counts.absences or self.is_excused or "deletionTimestamp" not in job["metadata"]
        if waits and not deaf and self.story.seconds > since + _TOLD_SECONDS:
            message = self.status.get("message") or ""
            if not message.startswith(DELETES):
                raise Violation(f"What is deleted says what it waits for. But it says: {message}")

    def _is_of(self, manifest: Object, uid: str) -> bool:
        return any(owner["uid"] == uid for owner in manifest["metadata"].get("ownerReferences", ()))

    def make_again(self) -> None:
        self.delete()
        if self.api.find("SFTJob") is None:
            self.make()

    def leave_behind(self) -> None:
        self._delete_as("orphan")

    def delete_in_foreground(self) -> None:
        self._delete_as("foregroundDeletion")

    def set_policy(self) -> None:
        policy = self.random.choice(["Keep", "Delete"])
        self.story.tell(f"user sets deletionPolicy {policy}")
        if self.api.find("SFTJob"):
            if "deletionTimestamp" in self.api.objects["SFTJob", KEY.name]["metadata"]:
                self.is_excused = True
            self._edit(deletionPolicy=policy)

    def set_time_to_live(self) -> None:
        seconds = self.random.choice([0, 20, None])
        self.story.tell(f"user sets the time to live {seconds}")
        policy = {"maxRestarts": 50, "startDeadlineSeconds": 60, "ttlSecondsAfterFinished": seconds}
        self._edit(runPolicy=policy)

    def delete_namespace(self) -> None:
        self.story.tell("the namespace is deleted")
        self.counts.others += 1
        self.api.is_terminating = self.is_excused = True
        end = self.story.seconds + _LONGEST_SECONDS
        while self.api.is_terminating:
            self.pass_time(1)
            if self.story.seconds > end - 1200:
                self.nodes.find()
                self.end_troubles()
            if self.story.seconds > end:
                left = list(self.api.objects)
                raise Violation(f"A namespace that is deleted goes. But {left} hold it: {self.status.get('message')}")

    def delete_without_store(self) -> None:
        """Which does not come back for as long as the job is there."""
        self.story.tell("the store is away for long")
        self.the_store.is_away = self.is_gone_for_long = True
        self._delete_undisturbed()
        self.the_store.is_away = self.is_gone_for_long = False

    def delete_behind_lost_node(self) -> None:
        """While its first pod trains on there."""
        pod = next((pod for pod in self.nodes.pods if pod.index == 0 and pod.serving and pod.attempt), None)
        if pod and not self.nodes.lost_node:
            self.story.tell(f"nothing is heard of {pod.node}")
            self.counts.others += 1
            self.nodes.lose(pod.node)
            self._delete_undisturbed()

    def lose_store(self) -> None:
        self.story.tell("the store is away")
        self.the_store.is_away = True
        self.counts.others += 1

    def find_store(self) -> None:
        self.the_store.is_away = self.is_gone_for_long

    def slow_store(self) -> None:
        self.the_store.seconds_each = self.random.choice([0.0, 1.0, 2.5])
        self.story.tell(f"a request of the store takes {self.the_store.seconds_each} s")

    def trouble_store(self) -> None:
        self.story.tell("the store has trouble")
        self.the_store.troubles = self.random.choice([1, 4, 15])

    def other_comes(self, at_once: bool = False) -> None:
        if self.others:
            return
        self._came += 1
        self.counts.others += 1
        uid = f"other-{self._came}"
        other = Writer(self.story, self.the_store, uid, f"elsewhere-{self._came}")
        self.others.append(other)
        self._their_steps = 0
        take_over = at_once or self.random.random() < 0.6
        self.story.tell(f"{uid} comes, to take over: {take_over}")
        self.words = {uid: f"{uid} take-over"} if take_over else {}
        self.counts.fatal_failures += 1
        self._let_enter(other)

    def other_may_come(self) -> None:
        self.comes_between = True

    def other_goes(self) -> None:
        for other in list(self.others):
            self.story.tell(f"{other.uid} goes")
            if self.random.random() < 0.6:
                other.say_ended("it was asked to")
            self._end(other)

    def use_job_quota(self) -> None:
        self.story.tell("no Job may be made")
        self.counts.others += 1
        self.api.refuses_jobs = True
        if self.random.random() < 0.5:
            self.delete_job()
        self.pass_time(_TOLD_SECONDS)
        self._look_for_reason()

    def _look_for_reason(self) -> None:
        """A job that cannot have its Job says so."""
        job = self.api.find("SFTJob")
        quiet = not self.operator.client.troubles and self.operator.client.lasts is None and self.operator.is_there
        wanted = job and not job["spec"].get("suspend") and "deletionTimestamp" not in job["metadata"]
        if not quiet or not wanted or self.api.find("Job") or self.the_store.is_away or self.api.all_of("Pod"):
            return
        if self._reason() in ("Deactivated",) or self.status.get("state") in ("Complete", "Failed"):
            return
        if not self.api.refuses_jobs or "quota" not in (self.status.get("message") or ""):
            raise Violation(f"What hinders a job is told. But it is {self.status}")

    def free_job_quota(self) -> None:
        self.api.refuses_jobs = False

    def wait_long(self) -> None:
        self.pass_time(100)

    # Operators

    def replace_operator(self) -> None:
        """By another version, or one with other settings, which is taken back later."""
        self.story.tell("another version of the operator takes over")
        self.counts.absences += 1
        choice = self.random.choice(["image", "policy", "store"])
        store = STORE.model_copy(update={"remove": choice != "store"})
        changes: dict[str, Any] = {"store": store}
        if choice == "image":
            changes["pods"] = PodSettings(image="trainer:2")
        if choice == "policy":
            changes["network_policy"] = NetworkPolicySettings(enabled=False)
        if choice == "store":
            self.is_excused = True
        self.operator.leave()
        self.operator.settings = SETTINGS.model_copy(update=changes)
        self.pass_time(self.random.choice([0.2, 3, 30]))
        self.operator.begin()

    def settle_operator(self) -> None:
        self.operator.leave()
        self.operator.settings = SETTINGS.model_copy(update={"store": STORE})
        self.operator.begin()

    def relist(self) -> None:
        self.operator.relist()

    def watch_again(self) -> None:
        self.operator.watch_again()


def _ttl(job: Object) -> object:
    return job["spec"]["runPolicy"].get("ttlSecondsAfterFinished")


_WHILE_IT_GOES = (
    "lose_store",
    "find_store",
    "trouble_store",
    "slow_store",
    "other_comes",
    "other_may_come",
    "other_goes",
    "set_policy",
    "trouble",
    "kill_operator",
    "restart_operator",
    "replace_operator",
    "relist",
    "watch_again",
    "lose_node",
    "find_node",
    "delete_job",
)
