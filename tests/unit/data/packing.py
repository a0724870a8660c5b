"""Files of rows as people pack them."""

import bz2
import gzip

import pyarrow as pa


def packed(content: bytes, packing: str) -> bytes:
    """``content`` as in a file with the suffix ``packing``; as it is where that is empty."""
    match packing:
        case ".gz":
            return gzip.compress(content)
        case ".bz2":
            return bz2.compress(content)
        case ".zst":
            sink = pa.BufferOutputStream()
            with pa.CompressedOutputStream(sink, "zstd") as file:
                file.write(content)
            return bytes(sink.getvalue().to_pybytes())
        case _:
            return content
