"""A range of an S3 object, received where it is to lie; what breaks off goes on with another request."""

import http.client
from typing import TYPE_CHECKING, Any

from botocore.exceptions import IncompleteReadError, ResponseStreamingError

from sft_trainer.versions import plain_response

if TYPE_CHECKING:
    from sft_trainer.checkpoint.s3 import S3Store


class S3Range:
    """The bytes of a range, in their order."""

    def __init__(self, store: "S3Store", key: str, offset: int, length: int) -> None:
        self._store = store
        self._key = key
        self._position = offset
        self._end = offset + length
        self._answer: _Answer | None = None

    def fill(self, memory: memoryview) -> int:
        """Fill ``memory`` with the next bytes; how many there were, fewer only where the object ends.

        Retried as requests are, from the first byte that is missing.
        """
        start = 0

        def receive(client: Any) -> None:
            nonlocal start
            if self._answer is None:
                span = f"bytes={self._position}-{self._end - 1}"
                self._answer = _Answer(self._store.call(client, "get_object", self._key, {"Range": span}))
            try:
                while start < memory.nbytes and (count := self._answer.readinto(memory[start:])):
                    start += count
                    self._position += count
            except BaseException:
                self.close()
                raise

        if memory.nbytes and self._position < self._end:
            self._store.retrying(self._key, receive)
        return start

    def close(self) -> None:
        """Give the connection back, or end it when there is more to come."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None


class _Answer:
    """The body of an answer of botocore's, whose bytes are not copied on their way.

    urllib3 reads into memory of its own, and copies: what http.client has is asked in its place. Where there is no such
    thing (another version, an encoded body) it is botocore's body.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        self._body = answer["Body"]
        self._left = int(answer["ContentLength"])
        self._plain = None if "ContentEncoding" in answer else plain_response(self._body)

    def readinto(self, memory: memoryview) -> int:
        """Fill ``memory``, or as much of it as there is left; 0 at the end. Raises botocore's errors."""
        if self._plain is None:
            return int(self._body.readinto(memory))
        if not self._left:
            return 0
        try:
            count = self._plain[1].readinto(memory)
        except (OSError, http.client.HTTPException) as error:
            raise ResponseStreamingError(error=error) from error
        if not count:
            raise IncompleteReadError(actual_bytes=0, expected_bytes=self._left)
        self._left -= count
        return count

    def close(self) -> None:
        """The connection can be used again when all was read."""
        if self._plain is not None and not self._left:
            self._plain[0].release_conn()
        self._body.close()
