"""Entry of a worker process: ``python -m sft_trainer``, started by the supervisor.

Reads ``SFT_CONFIG`` (path of the TrainerConfig JSON) and ``SFT_RUN_DIR``, and RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT and SFT_GENERATION. Exits with the code of the failure class; the error itself is in the run
directory. SIGUSR1 prints the stack of the thread that trains, SIGUSR2 those of all.
"""

from .process import begin, leave, report_end


def main() -> int:
    """Run this process's part of the run; returns the exit code."""
    config, run_dir = begin()

    from .distributed import Ranks
    from .dummy_run import DummyRun
    from .trainer import Trainer

    ranks = Ranks.from_environment()
    kind = DummyRun if config.spec.training.dummy_run else Trainer
    trainer = kind(config, ranks, run_dir)
    try:
        trainer.run()
    except BaseException as error:  # every end is classified and reported
        return report_end(error, run_dir, rank=ranks.rank, step=trainer.step, attempt=trainer.attempt)
    return 0


if __name__ == "__main__":
    leave(main())
