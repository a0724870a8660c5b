"""docs/reference/exit-codes.md says what the code does."""

import re
from pathlib import Path

from sft_api.failures import FailureClass, exit_code, is_retryable

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "exit-codes.md"


def test_the_page_lists_every_code_with_its_class_and_whether_it_is_retried() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (yes|no) \|", PAGE.read_text(), re.MULTILINE)

    assert rows == [
        (str(int(exit_code(failure))), failure.value, "yes" if is_retryable(failure) else "no")
        for failure in sorted(FailureClass, key=exit_code)
    ]
