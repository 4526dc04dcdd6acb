#!/usr/bin/env bash
# pyright in strict mode over src/. The npm side of it is fetched once by its wrapper package; where
# that cannot be done (no network), this says so and passes: CI elsewhere still checks.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py="$(bash scripts/find_python.sh)" || exit 1
bin="$(dirname "$py")"
if ! "$bin/pyright" --version >/dev/null 2>&1; then
  echo "types: skipped, pyright cannot start here (it needs Node.js, which its wrapper fetches)" >&2
  exit 0
fi
exec "$bin/pyright" --pythonpath "$py" "$@"
