"""What a save in the background costs a measured run, and how long it takes to go on from it."""

from itertools import pairwise

from .figures import Figures, one_line, say
from .measured import OutOfTimeError, Scene, Seen, followed


def save_and_load(scene: Scene, figures: Figures) -> None:
    """What a save in the background costs a run of this size, and how long it takes to go on from it."""
    shape, every = scene.shape.name, scene.effort.warm_up_steps + 4
    config = scene.config("saving", everySteps=every)
    try:

        def is_saved(seen: list[Seen]) -> bool:
            return bool(seen) and seen[-1].saved >= every and seen[-1].step > every + 1

        run, steps = followed(scene, "saving", config, is_saved)
        times: dict[int, float] = {}
        for seen in steps:
            times.setdefault(seen.step, seen.time)
        order = sorted(times)
        lasted = {b: (times[b] - times[a]) / (b - a) for a, b in pairwise(order) if a >= 2}
        usual = sorted(lasted[step] for step in lasted if step <= every)
        if usual and (later := [step for step in order if step > every]):
            typical = usual[len(usual) // 2]
            since = times[order[-1]] - times[max(step for step in order if step <= every)]
            figures.add(
                {
                    f"{shape}_save_step_seconds": lasted[later[0]],
                    f"{shape}_usual_step_seconds": typical,
                    f"{shape}_save_stall_seconds": max(0.0, since - typical * (order[-1] - every)),
                }
            )
        saved = next(seen.time for seen in steps if seen.saved >= every)
        figures.add({f"{shape}_save_seconds": saved - times.get(every, times[order[-1]])})
        run, steps = followed(scene, "saving", config, lambda seen: bool(seen) and seen[-1].step > every)
        if steps[0].step < every:
            raise RuntimeError(f"the run began at step {steps[0].step}, and has a checkpoint of step {every}")
        figures.add({f"{shape}_resumed_after_seconds": run.seconds, f"{shape}_resumed_at_step": steps[0].step})
    except OutOfTimeError as reason:
        figures.add({f"{shape}_save": "no_time_left"})
        say(f"{shape}: the run that saves was ended {reason}")
    except Exception as error:
        figures.add({f"{shape}_save": "failed"})
        say(f"{shape}: the run that saves failed: {one_line(error)}")
