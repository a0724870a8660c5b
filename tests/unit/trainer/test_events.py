"""What listeners ask for, and when all processes do it."""

from sft_trainer.events import Asking, Control, Listener, Listeners, Request, StepDone
from tests.unit.trainer.test_run_story import step_done


class Names(Listener):
    """Writes down what it hears."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def on_step(self, event: StepDone, control: Control) -> None:
        self.heard.append(f"{self.name} {event.step}")


def agree(*controls: Control) -> None:
    """As the all-reduce of a step does."""
    sums = [sum(each) for each in zip(*(control.asked() for control in controls), strict=True)]
    for control in controls:
        control.agree(sums)


def test_listeners_hear_in_the_order_in_which_they_were_registered() -> None:
    heard: list[str] = []
    listeners = Listeners([Names("first", heard), Listener(), Names("second", heard)], Control())
    listeners.emit(step_done(1))
    listeners.emit(Asking(2))
    listeners.emit(step_done(2))
    assert heard == ["first 1", "second 1", "first 2", "second 2"]


def test_what_one_process_asks_for_all_do_once() -> None:
    ours, theirs = Control(), Control()
    theirs.ask(Request.SAVE)
    theirs.ask(Request.STOP)
    assert not theirs.wants(Request.SAVE)
    agree(ours, theirs)
    for control in (ours, theirs):
        assert (control.wants(Request.SAVE), control.wants(Request.EVALUATE)) == (True, False)
        assert (control.takes(Request.SAVE), control.takes(Request.SAVE)) == (True, False)
    # What is not done yet is not forgotten, and what was asked for is not asked again.
    agree(ours, theirs)
    assert (ours.takes(Request.STOP), ours.takes(Request.SAVE)) == (True, False)


def test_what_all_decide_alike_needs_no_agreement() -> None:
    control = Control()
    control.decide(Request.SAVE)
    assert control.asked() == [0.0] * len(Request)
    assert control.takes(Request.SAVE)
