"""What the trainer raises, as errors of a command."""

from collections.abc import Iterator
from contextlib import contextmanager

from sft_api.failures import exit_code
from sft_trainer.errors import TrainingError

from .errors import UserError


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Has what the trainer cannot do told in its sentences, with the exit code of that failure."""
    try:
        yield
    except TrainingError as error:
        raise UserError(str(error), exit_code=exit_code(error.failure)) from error
