"""What the user can mend: shown as sentences, never as a traceback."""

from sft_api.failures import ExitCode


class UserError(Exception):
    """One or more problems, each a sentence that says what to change."""

    def __init__(self, *problems: str, exit_code: int = ExitCode.CONFIG_ERROR) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
        self.exit_code = int(exit_code)
