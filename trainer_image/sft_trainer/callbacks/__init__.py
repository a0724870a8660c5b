"""What a class of ``training.callbacks`` is made of: public, and stable.

Nothing else of this package is: a callback imports from here only, also in tests without the trainer's libraries.
"""

from .base import Callback, Checkpoint, Control, End, Evaluation, Log, Run, Step

__all__ = ["Callback", "Checkpoint", "Control", "End", "Evaluation", "Log", "Run", "Step"]
