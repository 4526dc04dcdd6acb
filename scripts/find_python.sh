#!/usr/bin/env bash
# Prints the interpreter that the project uses: the active virtual environment's, else .venv's.
# With --base: one to create .venv from (Python 3.11 to 3.13; $PYTHON overrides).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

if [ "${1:-}" != "--base" ]; then
  if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
    echo "$VIRTUAL_ENV/bin/python"
  elif [ -x "$root/.venv/bin/python" ]; then
    echo "$root/.venv/bin/python"
  else
    echo "no virtual environment is active and there is no .venv: run 'make setup'" >&2
    exit 1
  fi
  exit 0
fi

# The first one that has torch already wins, so that nothing is downloaded twice.
candidates=()
for name in ${PYTHON:-python3 python python3.12 python3.13 python3.11}; do
  path="$(command -v "$name" 2>/dev/null)" || continue
  if fits "$path"; then candidates+=("$path"); fi
done
if [ "${#candidates[@]}" -eq 0 ]; then
  echo "no Python 3.11 to 3.13 found (looked for: ${PYTHON:-python3 python python3.12 python3.13 python3.11})" >&2
  echo "hint: install one, or name it: PYTHON=/path/to/python3.12 make setup" >&2
  exit 1
fi
for path in "${candidates[@]}"; do
  if "$path" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
    echo "$path"
    exit 0
  fi
done
echo "${candidates[0]}"
