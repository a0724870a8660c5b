"""Everything that a spec names by a URI. Pure."""

from .v1alpha1.job import SFTJobSpec


def uris_of(spec: SFTJobSpec) -> dict[str, str]:
    """The URIs of ``spec``, by their paths below it: what is read and, of checkpoints and export, written."""
    origin = spec.checkpoint.resume.origin
    sources = (("train", spec.data.train), ("eval", spec.data.eval))
    given = {
        "model.uri": spec.model.uri,
        "model.tokenizerUri": spec.model.tokenizer_uri,
        "lora.adapterUri": spec.lora and spec.lora.adapter_uri,
        **{f"data.{part}[{number}].uri": each.uri for part, several in sources for number, each in enumerate(several)},
        "checkpoint.uri": spec.checkpoint.uri,
        "checkpoint.resume.from.uri": origin and origin.uri,
        "export.uri": spec.export.uri,
    }
    return {path: uri for path, uri in given.items() if uri}
