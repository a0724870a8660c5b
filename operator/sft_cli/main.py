"""``sft``: try, check and run SFTJobs from the command line; ``kubectl sft`` is the same program.

Commands import what they need when they run, so that ``sft --help`` answers at once.
"""

import errno
import gc
import importlib.util
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .console import open_streams, say, warn
from .errors import UserError

if TYPE_CHECKING:
    from sft_api.v1alpha1.job import SFTJob

    from .overrides import Override

Command = TypeVar("Command", bound=Callable[..., Any])

MANIFEST = click.Path(exists=True, allow_dash=True, path_type=Path)
_DEBUG = "sft_cli.debug"
_INTERNAL_ERROR = 1
_INTERRUPTED = 128 + signal.SIGINT
"""What shells call a program that Ctrl-C has ended."""
_TO_READ_CHECKPOINTS = ("numpy", "boto3", "blake3")
"""Of what the trainer needs; not torch, whose import takes longer than most of these commands."""


def debug_option(command: Command) -> Command:
    """``--debug``, accepted before and after the command's name."""

    def remember(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            context.meta[_DEBUG] = True

    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=remember, help="Show tracebacks of errors."
    )(command)


job_option = click.option("--job", "name", metavar="NAME", help="The SFTJob to take, where there are several.")


def _overrides(_: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> "tuple[Override, ...]":
    if not texts:
        return ()
    from .overrides import OverrideError, read_override

    try:
        return tuple(read_override(text) for text in texts)
    except OverrideError as error:
        raise click.BadParameter(str(error), param=parameter) from error


set_option = click.option(
    "--set",
    "overrides",
    metavar="PATH=VALUE",
    multiple=True,
    callback=_overrides,
    help="A field of the manifest, as training.steps=20; again for others. null takes a field out.",
)


class Commands(click.Group):
    """A group that shows errors as sentences."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            # Not as click has it: 1 says that sft is in error. Once more ends it where threads still hold it up.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            say("\nInterrupted.", fg="yellow")
            ctx.exit(_INTERRUPTED)
        except Exception as error:
            if ctx.meta.get(_DEBUG):
                raise
            said = _of_long_name(error) or error
            _show(said)
            ctx.exit(said.exit_code if isinstance(said, UserError) else _INTERNAL_ERROR)


def _of_long_name(error: Exception) -> UserError | None:
    """What to say where a manifest, or an argument, names what no file system can hold: whoever looks is told so."""
    if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
        return None
    return UserError(
        f"{error.filename} cannot be there: a name between two slashes has at most 255 bytes, and all of a path 4095; "
        "name another file or folder"
    )


def _show(error: Exception) -> None:
    if isinstance(error, UserError):
        for problem in error.problems:
            say(problem, fg="red")
    else:
        say(f"sft failed unexpectedly: {type(error).__name__}: {error}", fg="red")
        say("This is an error in sft: please report it with the output of the same command and --debug.")


def _load(
    path: Path, name: str | None, overrides: "Sequence[Override]", *, generated_names: bool = False
) -> "tuple[SFTJob, SFTJob | None]":
    """The job with its ``overrides``, and as the manifest alone has it, where that is another one, and valid."""
    from .manifest import ManifestError, load_overridden

    try:
        return load_overridden(
            path,
            name,
            overrides,
            generated_names=generated_names,
            on_warning=warn,
        )
    except ManifestError as error:
        raise UserError(*error.problems) from error


def _start_the_trainer(*needed: str) -> None:
    """For commands that use the trainer. Raises UserError where one of the ``needed`` packages is not installed, or the
    current folder is gone: there torch ends the process while it is imported."""
    if any(importlib.util.find_spec(package) is None for package in needed or ("torch",)):
        raise UserError("the trainer is not installed here: pip install '.[cli,trainer]' in its checkout")
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder is no longer there: change into one that is, and run sft again") from None
    gc.enable()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sft-operator", message="%(version)s")
@debug_option
def cli() -> None:
    """Supervised fine-tuning from one manifest: the same SFTJob here and in a cluster."""


@cli.command()
@click.argument("manifest", type=MANIFEST)
@job_option
@set_option
@click.option("--processes", type=click.IntRange(min=1, max=256), help="Training processes, instead of the manifest's.")
@click.option(
    "--launcher", type=click.Choice(["supervisor", "ray"]), help="Who places them, instead of the manifest's."
)
@click.option("--fresh", is_flag=True, help="Start from the model; what an earlier run left is set aside, not deleted.")
@click.option(
    "--take-over", is_flag=True, help="Train also while another machine or job does so in this place, which ends then."
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "yaml", "json"]),
    default="text",
    show_default=True,
    help="text: how it ended, in a few lines; yaml and json: the whole status, and plain progress even on a terminal.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the log of supervisor and workers too.")
@debug_option
def run(
    manifest: Path,
    name: str | None,
    overrides: "tuple[Override, ...]",
    processes: int | None,
    launcher: str | None,
    fresh: bool,
    take_over: bool,
    output: str,
    verbose: bool,
) -> None:
    """Run an SFTJob on this machine, without a cluster.

    All processes of the job run here. Checkpoints, export and logs go to sft-runs/NAME in the current folder unless
    the manifest says otherwise; the same command again goes on from the newest checkpoint. The exit code is 0 only
    when the run is complete.
    """
    job, _ = _load(manifest, name, overrides)
    _start_the_trainer()
    from .run import Options, run_job

    options = Options(
        name=name,
        overrides=tuple(override.text for override in overrides),
        processes=processes,
        launcher=launcher,
        fresh=fresh,
        take_over=take_over,
        output=output,
        verbose=verbose,
    )
    sys.exit(run_job(job, manifest, options))


@cli.command()
@click.argument("manifests", type=MANIFEST, nargs=-1, required=True)
@set_option
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@debug_option
def validate(manifests: tuple[Path, ...], overrides: "tuple[Override, ...]", output: str) -> None:
    """Check manifests as the API server would: files, folders of them, or - for standard input.

    Prints one line a problem; the exit code is 10 when there is one.
    """
    from .validate import validate_manifests

    sys.exit(validate_manifests(manifests, output, overrides))


@cli.command()
@click.argument("manifest", type=MANIFEST)
@job_option
@set_option
@click.option("-o", "--output", type=click.Choice(["text", "yaml", "json"]), default="text", show_default=True)
@click.option("--suggest", is_flag=True, help="Show instead with which strategy the run would fit its GPUs.")
@debug_option
def plan(manifest: Path, name: str | None, overrides: "tuple[Override, ...]", output: str, *, suggest: bool) -> None:
    """Show what would be run, and why.

    Every number, and whether the manifest or --set gives it, it is a default, or it was computed from the rest. The
    exit code is 10 when the run does not fit its GPUs.
    """
    job, alone = _load(manifest, name, overrides, generated_names=True)
    if suggest:
        from .suggest import show_suggestions

        sys.exit(show_suggestions(job, output))
    from .plan import show_plan

    sys.exit(show_plan(job, output, alone))


@cli.command()
@click.argument("manifest", type=MANIFEST)
@job_option
@set_option
@click.option("-n", "--rows", type=click.IntRange(min=1), default=3, show_default=True, help="Rows of each data set.")
@click.option("--eval", "evaluation", is_flag=True, help="The evaluation sets instead of the training sets.")
@click.option("--all", "everything", is_flag=True, help="Tokenise all rows, and show what becomes of them instead.")
@click.option("-o", "--output", type=click.Choice(["text", "jsonl"]), default="text", show_default=True)
@debug_option
def data(
    manifest: Path,
    name: str | None,
    overrides: "tuple[Override, ...]",
    rows: int,
    evaluation: bool,
    everything: bool,
    output: str,
) -> None:
    """Show the first rows as the model sees them.

    Every token that is trained is marked: in colour on a terminal, between ⟦ and ⟧ elsewhere. With --all how many rows
    are kept, their tokens, and the steps that they make. The exit code is that of the failure when something cannot be
    read.
    """
    if everything and output != "text":
        raise click.UsageError("--all shows no rows: leave --output out")
    job, _ = _load(manifest, name, overrides, generated_names=True)
    _start_the_trainer()
    if everything:
        from .all_data import show_all_data

        show_all_data(job, evaluation=evaluation)
        return
    from .data import show_data

    show_data(job, rows=rows, evaluation=evaluation, output=output)


@cli.command()
@click.argument("manifest", type=MANIFEST)
@job_option
@set_option
@click.option("--step", type=click.IntRange(min=1), help="The checkpoint of this step instead of the newest one.")
@click.option("--best", is_flag=True, help="The checkpoint with the lowest evaluation loss.")
@click.option(
    "--to",
    metavar="URI",
    help="Where the model goes, if not to the manifest's export.uri. A model that lies there is replaced.",
)
@click.option(
    "--from", "checkpoints", metavar="URI", help="Where the checkpoints are, instead of the manifest's place."
)
@click.option("--uid", help="The job that is meant, where the checkpoints of several lie in one place.")
@click.option("--upload", is_flag=True, help="Upload the folder then, to the repository of the manifest's export.hub.")
@debug_option
def export(
    manifest: Path,
    name: str | None,
    overrides: "tuple[Override, ...]",
    step: int | None,
    best: bool,
    to: str | None,
    checkpoints: str | None,
    uid: str | None,
    upload: bool,
) -> None:
    """Export a checkpoint of an SFTJob as a Hugging Face folder.

    No GPU and no cluster is needed: only checkpoints and model must be in reach. The newest verified checkpoint is
    taken unless --step or --best say otherwise. The same command again goes on with what is missing. Prints where the
    model is; the exit code is that of the failure when it cannot be exported.
    """
    if step is not None and best:
        raise click.UsageError("--step and --best choose a checkpoint in two ways: give one of them")
    job, _ = _load(manifest, name, overrides)
    _start_the_trainer()
    from .export import export_job

    export_job(job, step=step, best=best, to=to, checkpoints=checkpoints, uid=uid, upload=upload)


@cli.group()
@debug_option
def checkpoints() -> None:
    """Look at the checkpoints of a run, compare their bytes, remove old ones.

    PLACE is a URI (s3://, file:///, pvc:// where it is mounted), a folder, the manifest of the job, the name of a run
    in sft-runs, or - for an object of a cluster: kubectl get sftjob NAME -o yaml | sft checkpoints list -
    """


place_argument = click.argument("place", metavar="PLACE")
text_or_json = click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)


@checkpoints.command("list")
@place_argument
@job_option
@text_or_json
@debug_option
def list_(place: str, name: str | None, output: str) -> None:
    """Show whose run it is, and every checkpoint: step, size, losses, which is the best, which are none and why.

    Manifests, sizes and indexes are read, and no tensors: verify reads these.
    """
    _start_the_trainer(*_TO_READ_CHECKPOINTS)
    from .checkpoints import list_checkpoints

    list_checkpoints(place, name=name, output=output)


@checkpoints.command()
@place_argument
@job_option
@click.option("--step", type=click.IntRange(min=0), help="Checkpoints of this step only.")
@click.option("--newest", is_flag=True, help="The newest one only.")
@text_or_json
@debug_option
def verify(place: str, name: str | None, step: int | None, newest: bool, output: str) -> None:
    """Read every byte of checkpoints and compare it with its digest.

    Of all, unless --step or --newest say which. File and tensor of what is damaged are named; the exit code is 10 when
    anything is.
    """
    _start_the_trainer(*_TO_READ_CHECKPOINTS)
    from .checkpoints import verify_checkpoints

    sys.exit(verify_checkpoints(place, name=name, step=step, newest=newest, output=output))


@checkpoints.command()
@place_argument
@job_option
@click.option("--keep-last", metavar="N", type=click.IntRange(min=1), help="The newest N stay.")
@click.option(
    "--keep-best", metavar="N", type=click.IntRange(min=1), help="The N with the lowest evaluation loss stay."
)
@click.option("--unfinished", is_flag=True, help="What interrupted saves left goes.")
@click.option("--yes", is_flag=True, help="Remove it; without it is only shown what would go.")
@debug_option
def prune(
    place: str, name: str | None, keep_last: int | None, keep_best: int | None, unfinished: bool, yes: bool
) -> None:
    """Remove old checkpoints, and what interrupted saves left.

    The newest one always stays, the last and the best one of a complete run, and without --keep-best as many of the
    best as PLACE says, where it is a manifest (checkpoint.keep.best); what that keeps for ever
    (checkpoint.keep.everySteps) stays. Those that cannot be verified are neither counted nor removed. While a run
    trains in the place only --unfinished is done, of earlier attempts.
    """
    if keep_last is None and keep_best is None and not unfinished:
        raise click.UsageError("say what stays (--keep-last, --keep-best) or that --unfinished saves go")
    _start_the_trainer(*_TO_READ_CHECKPOINTS)
    from sft_trainer.checkpoint.catalog import KeepPolicy

    from .checkpoints import prune_checkpoints

    keep = None if keep_last is None and keep_best is None else KeepPolicy(last=keep_last or 1, best=keep_best or 0)
    prune_checkpoints(place, name=name, keep=keep, best_of_job=keep_best is None, unfinished=unfinished, yes=yes)


@cli.command()
@click.argument("name")
@click.option("-n", "--namespace", help="Of the job; that of the context by default.")
@click.option("--context", help="Of the kubeconfig; the current one by default.")
@click.option(
    "--take-over", is_flag=True, help="Also while another job trains in its place (PlaceInUse): that one ends then."
)
@debug_option
def retry(name: str, namespace: str | None, context: str | None, take_over: bool) -> None:
    """Have the SFTJob NAME, which has failed on the cluster, begin again from its newest checkpoint."""
    from .console import result
    from .retry import retry as ask

    result(ask(name, namespace, context, take_over=take_over))


def main() -> None:
    """Entry point of ``sft`` and ``kubectl-sft``."""
    gc.disable()  # Most commands end before garbage matters, and building the API's models collects it often.
    open_streams()
    program = "kubectl sft" if Path(sys.argv[0]).name.startswith("kubectl") else "sft"
    cli.main(prog_name=program)


if __name__ == "__main__":
    main()
