"""What the operator writes into its log."""

import logging

from sft_operator.__main__ import OneLine


def test_words_of_tenants_make_no_lines_of_their_own() -> None:
    record = logging.LogRecord(
        "a", logging.WARNING, "", 0, "%s: gr\u00fcn", ("x\n2026 CRITICAL all is lost\x1b[2J\u202e",), None
    )

    line = OneLine("%(levelname)s %(message)s").format(record)

    assert line == "WARNING x\\n2026 CRITICAL all is lost\\x1b[2J\\u202e: gr\u00fcn"
