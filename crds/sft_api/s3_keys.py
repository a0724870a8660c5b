"""Access keys as they are written into Secrets, often with the line end of the file that they were made of."""

from typing import Any


def without_line_ends(credentials: Any) -> None:
    """Have botocore's ``credentials`` sign without the white space around keys, which are none of it.

    With it a server says that the signature is another one, or none is sent, as no header may hold a line end.
    """
    plain = credentials.get_frozen_credentials

    def cleaned() -> Any:
        frozen = plain()
        names = ("access_key", "secret_key", "token")
        keys = {name: value.strip() for name in names if isinstance(value := getattr(frozen, name), str)}
        return frozen._replace(**keys)

    credentials.get_frozen_credentials = cleaned
