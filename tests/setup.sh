#!/usr/bin/env bash
# Creates .venv on a bare machine (python >= 3.11 is the only need) from the hash-locked requirements.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
.venv/bin/python -m pip install --quiet --require-hashes -r requirements/uv.txt
# Compiled here once: where Python may not write bytecode, every process that tests start would compile torch anew.
.venv/bin/uv pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements/dev.txt \
    requirements/uv.txt
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --editable .
