#!/usr/bin/env bash
# Trains SHAPE on a machine with a GPU and evaluates it: the model, its log and its routes, under OUT.
# Needs the ids of training.prepare (IDS) and the texts of training.texts (TEXTS).
set -euo pipefail
: "${IDS:?}" "${TEXTS:?}" "${OUT:?}"
shape="${SHAPE:-small}" minutes="${MINUTES:-5.7}" py="${PY:-python3}"
export PYTHONUNBUFFERED=1
"$py" -m training.train --ids "$IDS" --out "$OUT/$shape" --shape "$shape" \
  --minutes "$minutes" --log-every 50 ${EXTRA:-}
"$py" -m training.evaluate --model "$OUT/$shape/model" --ids "$IDS" --texts "$TEXTS" \
  --out "$OUT/eval-$shape"
