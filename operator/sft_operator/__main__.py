"""The operator: ``python -m sft_operator [--config FILE] [--namespace NAME]``.

In a pod it uses its service account, elsewhere the file that KUBECONFIG names.
"""

import argparse
import asyncio
import gc
import logging
import os
import sys
import tempfile
from pathlib import Path

import uvloop
import yaml
from pydantic import ValidationError

from sft_api.fitting import fit_status
from sft_api.trust import trust

from .cluster.client import ConfigError
from .cluster.informer import HistoryLost
from .cluster.leadership import LeadershipLost
from .config import load_settings
from .controller import run


class OneLine(logging.Formatter):
    """Messages hold words of tenants, who could write lines of their own into the log, or colour it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of ``record``; tracebacks follow it as they are."""
        line = super().formatMessage(record)
        return line if line.isprintable() else "".join(_printed(character) for character in line)


def _printed(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def main(arguments: list[str] | None = None) -> int:
    """Run the operator; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sft_operator", description="Operator for SFTJobs.")
    default = os.environ.get("SFT_OPERATOR_CONFIG")
    parser.add_argument("--config", type=Path, default=default, help="settings (YAML or JSON)")
    parser.add_argument("--namespace", help="serve only this namespace")
    parser.add_argument("--http-port", type=int, help="port of /metrics, /healthz and /readyz")
    options = parser.parse_args(arguments)
    flags = {"namespace": options.namespace, "httpPort": options.http_port}
    try:
        given = {name: value for name, value in flags.items() if value is not None}
        settings = load_settings(options.config, **given)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=settings.log_level, handlers=[handler])
        if settings.ca_bundle:
            trust(settings.ca_bundle, Path(tempfile.mkdtemp()), os.environ)
        fit_status({})  # walks the schema: not while the first job waits
        # Of what a look makes hardly anything is a cycle, and all that was imported stays.
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        uvloop.run(run(settings))
    except (ConfigError, HistoryLost, LeadershipLost, OSError, ValidationError, yaml.YAMLError) as error:
        print(f"sft-operator: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        return 0  # asked to end before there was anything to do
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
