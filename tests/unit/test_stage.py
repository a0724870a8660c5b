"""What end-to-end tests see where nobody answers, as while they kill the API server."""

import http.server
import threading
from typing import Any

import pytest

from tests.e2e.stage import Stage
from tests.integration.kubernetes_api import KubernetesApi


class Away(http.server.BaseHTTPRequestHandler):
    """A proxy without the API server behind it."""

    def do_GET(self) -> None:
        self.send_response(502)
        self.end_headers()
        self.wfile.write(b"error trying to reach service")

    def log_message(self, *_: Any) -> None: ...


def test_an_api_server_that_is_away_is_told_as_one_error() -> None:
    nothing: Any = None
    with http.server.HTTPServer(("127.0.0.1", 0), Away) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(RuntimeError, match=r"no answer for /apis/.*/team/sftjobs/mine: "):
            Stage(nothing, nothing, "team", KubernetesApi(url)).job("mine")
        server.shutdown()

    with pytest.raises(RuntimeError, match=r"no answer for .*refused"):
        Stage(nothing, nothing, "team", KubernetesApi(url)).job("mine")
