"""Is the exported model the trained one?"""

from .stage import BUCKET, Stage

LIMIT = 1e-4


def loss_difference(stage: Stage, name: str) -> float:
    """Distance of the export's evaluation loss, by plain transformers, from the reported one."""
    from examples.demo import held_out_loss

    reported = stage.status(name)["progress"]["evalLoss"]
    rows = stage.store.folder / BUCKET / "quickstart" / "data" / "eval.jsonl"
    return abs(held_out_loss(stage.folder(name) / "export", rows) - float(reported))
