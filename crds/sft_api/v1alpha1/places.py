"""Rules that keep what a run writes away from what it was made of, and from another run."""

from typing import TYPE_CHECKING

from .base import Rule
from .uris import overlap, overlap_in_cel, within, within_in_cel

if TYPE_CHECKING:
    from .job import SFTJobSpec

EXPORT_FOLDER = "export"
"""Folder beside the checkpoints where the export goes when ``export.uri`` is absent."""

STEP_EXPORTS = "step-"
"""With which the names of the folders of exports on the way begin, in the place of the export."""


def default_export(checkpoint_uri: str) -> str:
    """Where the export goes beside checkpoints in ``checkpoint_uri``."""
    return f"{checkpoint_uri.rstrip('/')}/{EXPORT_FOLDER}"


def step_export(export_uri: str, step: int) -> str:
    """Where the checkpoint of ``step`` is exported to while the run that exports to ``export_uri`` goes on."""
    return f"{export_uri.rstrip('/')}/{STEP_EXPORTS}{step:08d}"


def _export(spec: "SFTJobSpec") -> str | None:
    """Where ``spec`` exports to, if it does and says where."""
    if not spec.export.at_end:
        return None
    return spec.export.uri or (default_export(spec.checkpoint.uri) if spec.checkpoint.uri else None)


def _origin(spec: "SFTJobSpec") -> str | None:
    """The place of another run from which ``spec`` begins."""
    origin = spec.checkpoint.resume.origin
    return origin.uri if origin else None


_CHECKPOINTS = "self.checkpoint.uri"
_ORIGIN = "self.checkpoint.resume.from.uri"
_HAS_ORIGIN = "has(self.checkpoint.resume.from)"
_DEFAULT_EXPORT = f"{_CHECKPOINTS} + ({_CHECKPOINTS}.endsWith('/') ? '{EXPORT_FOLDER}' : '/{EXPORT_FOLDER}')"


def _for_export(cel: str) -> str:
    """The expression ``cel`` of ``export``, which is true where nothing is exported or nobody says here where to."""
    return (
        f"!self.export.atEnd || !(has(self.export.uri) || has({_CHECKPOINTS})) || "
        f"[has(self.export.uri) ? self.export.uri : {_DEFAULT_EXPORT}].all(export, {cel})"
    )


def _spares(spec: "SFTJobSpec", *uris: str | None) -> bool:
    export = _export(spec)
    return export is None or not any(overlap(export, uri) for uri in uris if uri is not None)


def _saves_among_data(spec: "SFTJobSpec") -> bool:
    """Whether what the run writes lies in a folder that is read as data, records (.json, .jsonl) among it."""
    checkpoints, data = spec.checkpoint.uri, (*spec.data.train, *spec.data.eval)
    return checkpoints is not None and any(within(checkpoints, source.uri) for source in data)


def _spares_checkpoints(spec: "SFTJobSpec") -> bool:
    checkpoints = spec.checkpoint.uri
    if checkpoints is None or spec.export.uri is None or not spec.export.at_end:
        return True
    return spec.export.uri.rstrip("/") == default_export(checkpoints) or not overlap(spec.export.uri, checkpoints)


PLACE_RULES = (
    Rule(
        _for_export(
            f"!{overlap_in_cel('export', 'self.model.uri')} && (!has(self.model.tokenizerUri) || "
            f"!{overlap_in_cel('export', 'self.model.tokenizerUri')}) && (!has(self.lora) || "
            f"!has(self.lora.adapterUri) || !{overlap_in_cel('export', 'self.lora.adapterUri')})"
        ),
        "export.uri (export/ in checkpoint.uri when absent) must be neither model.uri, model.tokenizerUri or "
        "lora.adapterUri nor above or below them: the export would overwrite what the run starts from",
        lambda spec: _spares(spec, spec.model.uri, spec.model.tokenizer_uri, spec.lora and spec.lora.adapter_uri),
    ),
    Rule(
        _for_export(
            f"self.data.train.all(source, !{overlap_in_cel('export', 'source.uri')}) && "
            f"(!has(self.data.eval) || self.data.eval.all(source, !{overlap_in_cel('export', 'source.uri')}))"
        ),
        "export.uri (export/ in checkpoint.uri when absent) must be neither the uri of data.train or data.eval nor "
        "above or below one: the export would be written among the data",
        lambda spec: _spares(spec, *(source.uri for source in (*spec.data.train, *spec.data.eval))),
    ),
    Rule(
        f"!has({_CHECKPOINTS}) || (self.data.train.all(source, !{within_in_cel(_CHECKPOINTS, 'source.uri')}) && "
        f"(!has(self.data.eval) || self.data.eval.all(source, !{within_in_cel(_CHECKPOINTS, 'source.uri')})))",
        "checkpoint.uri must be neither the uri of data.train or data.eval nor below one: all that lies in a folder of "
        "data is read, and the run's own records would be taken for rows",
        lambda spec: not _saves_among_data(spec),
    ),
    Rule(
        f"!self.export.atEnd || !has(self.export.uri) || !has({_CHECKPOINTS}) || "
        f"(self.export.uri.endsWith('/') ? self.export.uri : self.export.uri + '/') == {_DEFAULT_EXPORT} + '/' || "
        f"!{overlap_in_cel('self.export.uri', _CHECKPOINTS)}",
        "export.uri must be neither checkpoint.uri nor above or below it, but for its folder export: the export would "
        "be written among the checkpoints",
        _spares_checkpoints,
    ),
    Rule(
        f"!{_HAS_ORIGIN} || " + _for_export(f"!{overlap_in_cel('export', _ORIGIN)}"),
        "export.uri (export/ in checkpoint.uri when absent) must be neither checkpoint.resume.from.uri nor above or "
        "below it: the export would be written into the place of the other run",
        lambda spec: _spares(spec, _origin(spec)),
    ),
    Rule(
        f"!{_HAS_ORIGIN} || !has({_CHECKPOINTS}) || !{overlap_in_cel(_CHECKPOINTS, _ORIGIN)}",
        "checkpoint.uri must be neither checkpoint.resume.from.uri nor above or below it: that is the place of another "
        "run; the same run goes on by itself",
        lambda spec: (
            spec.checkpoint.uri is None or not (origin := _origin(spec)) or not overlap(spec.checkpoint.uri, origin)
        ),
    ),
)
