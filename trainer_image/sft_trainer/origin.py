"""The checkpoint of another run from which this one begins: ``checkpoint.resume.from``.

Its place may be anybody's: it is only read, nothing in it is unpickled, and every byte is compared with a digest. Which
checkpoint it is, the record of the run says by its content from the first start on (``Pin``).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from sft_api.checkpoints import Manifest, RunState
from sft_api.numbers import Numbers, NumbersError, both_quoted
from sft_api.place import ORIGIN_FIELD, RUN_KEY, Pin, RecordError, doubts_of_weights
from sft_api.trainer_config import TrainerConfig
from sft_api.v1alpha1.runtime import OriginSpec

from .checkpoint.catalog import Catalog, Skipped
from .checkpoint.opening import store_at
from .errors import ConfigError

if TYPE_CHECKING:  # the look before the imports needs none of what these need
    from .boxes import Box
    from .saving import Saving

_MODULES = "training.trainableModules"
_SAME = (_MODULES, "model.addedTokens", "model.addedSpecialTokens")
"""What decides which values there are, and what they are of."""


class Origin:
    """Where a run begins that names a checkpoint of another one."""

    def __init__(self, config: TrainerConfig, spec: OriginSpec, recorded: Mapping[str, str]) -> None:
        """``recorded`` are the revisions in the record of the run."""
        self._config = config
        self._spec = spec
        self._recorded = recorded.get(ORIGIN_FIELD)
        self.uri = spec.uri.rstrip("/")
        self._store = store_at(self.uri, config)

    @classmethod
    def of(cls, config: TrainerConfig, recorded: Mapping[str, str]) -> "Origin | None":
        """That of the run of ``config``, if it has one."""
        spec = config.spec.checkpoint.resume.origin
        return cls(config, spec, recorded) if spec else None

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on after the step of the checkpoint."""
        return self._spec.what == "everything"

    def pin(self) -> Pin:
        """What the record of the run is to say; raises what ``find`` raises."""
        return self._pin(self.find())

    def find(self) -> Manifest:
        """The checkpoint that the record says, or the one to begin from now where it says none.

        Manifest and sizes are verified. Raises ``ConfigError`` when there is none that can be used for this run, and
        errors of the store.
        """
        manifest = self._newest() if self._recorded is None else self._find_recorded(self._recorded)
        self._check_adapters(manifest.run)
        if self.goes_on:
            self._check_position(manifest.run)
        return manifest

    def read(
        self, saving: "Saving", boxes: "Sequence[Box]", accept: Callable[[RunState], None], total_steps: int
    ) -> Manifest:
        """Fill ``boxes`` from it; a collective call. Raises what ``find``, ``accept`` and reading raise, and
        ``ConfigError`` when a run of ``total_steps`` has nothing left to do after its step."""

        def accepted(manifest: Manifest) -> None:
            accept(manifest.run)
            if self.goes_on and manifest.step >= total_steps:
                raise ConfigError(
                    f"{ORIGIN_FIELD}.what is everything, and the checkpoint is that of step {manifest.step}, while "
                    f"this run ends with step {total_steps}: give it more training.steps (or epochs), or name what: "
                    "weights to begin at step 0"
                )

        return saving.begin_from(self._store, self.find, boxes, accepted, goes_on=self.goes_on)

    def warning(self, run: RunState) -> str:
        """What to tell whoever begins with the weights of ``run``; empty where there is nothing."""
        try:
            other = doubts_of_weights(Numbers.read(run.numbers), self._config.numbers())
        except NumbersError:
            return ""
        return f"{self.uri}, which {ORIGIN_FIELD} names: {other}" if other else ""

    def _pin(self, manifest: Manifest) -> Pin:
        return Pin(manifest.id, hashlib.sha256(self._store.read(manifest.id.manifest_key)).hexdigest())

    def _find_recorded(self, text: str) -> Manifest:
        try:
            pin = Pin.read(text)
        except RecordError as error:
            raise ConfigError(f"{self._config.checkpoint_uri}/{RUN_KEY}: {error}") from error
        found = Catalog(self._store).find(pin.checkpoint)
        if isinstance(found, Skipped):
            raise ConfigError(
                f"{self.uri}: the checkpoint that this run began from cannot be used ({found}), and it has saved none "
                "of its own yet: restore it, or begin another run"
            )
        if self._pin(found) != pin:
            raise ConfigError(
                f"{self.uri}: {found.id.folder} is not the checkpoint that this run began from, its manifest is "
                "another one: restore that, or begin another run"
            )
        return found

    def _newest(self) -> Manifest:
        step, skipped = self._spec.step, []
        for found in Catalog(self._store).candidates(step):
            if isinstance(found, Manifest):
                return found
            skipped.append(str(found))
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        why = f" that can be used ({'; '.join(skipped)})" if skipped else ""
        advice = "name the checkpoint.uri of a run that has saved"
        if step is not None:
            saved = {found.step for found in Catalog(self._store).candidates() if isinstance(found, Manifest)}
            there = f" (there are {', '.join(map(str, sorted(saved)))})" if saved else ""
            advice = f"name another step{there}, or none"
        raise ConfigError(f"{self.uri}, which {ORIGIN_FIELD} names, holds {which}{why}: {advice}")

    def _check_adapters(self, run: RunState) -> None:
        """Refuse values that would mean something else here: of adapters, of the whole model, of other adapters or
        tokens."""
        try:
            theirs = Numbers.read(run.numbers)
        except NumbersError:  # whether that matters, what follows says
            return
        mine = self._config.numbers()
        for field in _SAME:
            if (here := mine.values.get(field)) != (there := theirs.values.get(field)):
                theirs_quoted, mine_quoted = both_quoted(there, here)
                raise ConfigError(
                    f"{self.uri}, which {ORIGIN_FIELD} names, holds what a run with {field} "
                    f"{theirs_quoted if there else '(none)'} trained, and this one has "
                    f"{mine_quoted if here else 'none'}: export that checkpoint (sft export; with adapters, "
                    f"export.mergeAdapter), and name its folder in model.uri, without {ORIGIN_FIELD}"
                )
        weights = "some weights" if mine.values.get(_MODULES) else "all weights"
        if mine.has_adapters and not theirs.has_adapters:
            raise ConfigError(
                f"{self.uri}, which {ORIGIN_FIELD} names, holds {weights} of a model, and this run trains adapters "
                "(lora) beside those of model.uri: export that checkpoint (sft export), and name its folder in "
                f"model.uri, without {ORIGIN_FIELD}"
            )
        if theirs.has_adapters and not mine.has_adapters:
            raise ConfigError(
                f"{self.uri}, which {ORIGIN_FIELD} names, holds adapters (lora), and this run trains {weights}: "
                "export that checkpoint with export.mergeAdapter (sft export), and name its folder in model.uri, "
                f"without {ORIGIN_FIELD}"
            )
        if changes := theirs.trained_differences(mine):
            raise ConfigError(
                f"{self.uri}, which {ORIGIN_FIELD} names, holds other adapters ({', '.join(changes)}): restore these, "
                "or export that checkpoint with export.mergeAdapter and name its folder in model.uri"
            )

    def _check_position(self, run: RunState) -> None:
        """Refuse to go on after a step of other data: half of it would never be seen, or be seen twice."""
        try:
            saved = Numbers.read(run.numbers)
            changes = saved.position_differences(self._config.numbers())
        except NumbersError as error:
            raise ConfigError(
                f"{self.uri}: {error}; name what: weights in {ORIGIN_FIELD} to begin at step 0"
            ) from error
        if changes:
            raise ConfigError(
                f"{ORIGIN_FIELD}.what is everything, which goes on after a step of the same data, and the run in "
                f"{self.uri} has other settings ({', '.join(changes)}): restore these, or name what: weights to begin "
                "at step 0"
            )
        numbers = self._config.numbers()
        if saved.optimizer != numbers.optimizer:
            raise ConfigError(
                f"{ORIGIN_FIELD}.what is everything, the optimizer's state among it, and the run in {self.uri} has "
                f"that of {saved.optimizer}, of which none of {numbers.optimizer} is made: set training.optimizer.type "
                f"to {saved.optimizer}, or name what: weights to begin at step 0 with a new one"
            )
        if not saved.has_moments_for(numbers):
            theirs, mine = saved.moments, numbers.moments
            raise ConfigError(
                f"{ORIGIN_FIELD}.what is everything, moments among it, and the run in {self.uri} holds these in "
                f"{theirs}, which is not converted to the {mine} of training.optimizer.stateDtype: set that to "
                f"{theirs}, or name what: weights to begin at step 0 with new ones"
            )
