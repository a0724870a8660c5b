#!/usr/bin/env bash
# Recomputes requirements/*.txt: exact versions with hashes, no download addresses. What requirements/without.in names
# is wanted by a package, and by nothing that is used of it.
set -euo pipefail
cd "$(dirname "$0")/.."
compile() { .venv/bin/uv pip compile --quiet --generate-hashes --no-header --python-version 3.11 --python-platform x86_64-manylinux_2_28 --override requirements/without.in "$@"; }
echo uv | compile - -o requirements/uv.txt
compile pyproject.toml --extra operator --extra trainer --extra megatron --extra cli --extra dev --extra parity -o requirements/dev.txt
for extra in operator trainer; do compile pyproject.toml --extra "$extra" -c requirements/dev.txt -o "requirements/$extra.txt"; done
compile pyproject.toml --extra trainer --extra megatron -c requirements/dev.txt -o requirements/megatron.txt
# Beside dev.txt, for `make gpu`: what only a GPU runs.
compile pyproject.toml --extra gpu -c requirements/dev.txt -o requirements/gpu.txt
compile pyproject.toml --extra trainer --extra bench -c requirements/dev.txt -o requirements/bench.txt
# Where the trackers that callbacks/trackers.py talks to are tried: their packages want other versions than dev.txt has.
printf 'wandb\nmlflow-skinny>=3.17\n' | compile - -o requirements/trackers.txt
# Not held to what dev.txt names: the oldest torch and transformers want older packages beside them.
compile pyproject.toml requirements/oldest.in --extra trainer --extra cli --extra parity --override requirements/oldest.in -o requirements/oldest.txt
