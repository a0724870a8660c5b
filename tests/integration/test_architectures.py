"""The page of architectures says what the trainer does."""

from tests.architectures import PAGE, page


def test_the_page_is_what_the_trainer_says_of_every_architecture() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run `make architectures` and commit the result"
