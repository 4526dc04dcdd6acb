#!/usr/bin/env bash
# One call on a machine with a GPU: evaluate TINY if it is there, train SHAPE, evaluate it, pack.
# Whatever is finished lies under $OUT at once, so that a stop in the middle costs only the rest.
set -u
: "${IDS:?}" "${TEXTS:?}" "${OUT:?}"
SHAPE="${SHAPE:-small}" MINUTES="${MINUTES:-5.7}" TINY="${TINY:-}" WORK="${WORK:-/tmp/run}"
PY="${PY:-python3}"
export PYTHONUNBUFFERED=1
pack() { tar -C "$WORK" -cf "$OUT/$1.tar" "$1"; }
mkdir -p "$WORK"
if [ -n "$TINY" ]; then
  timeout 90 "$PY" -m training.evaluate --model "$TINY" --ids "$IDS" --texts "$TEXTS" --out "$WORK/eval-tiny" 2>&1 | tail -12
  pack eval-tiny
fi
train() { "$PY" -m training.train --ids "$IDS" --out "$WORK/$SHAPE" --shape "$SHAPE" "$@" 2>&1 | tail -80; }
train --minutes "$MINUTES" --log-every 50 ${EXTRA:-}
cp "$WORK/$SHAPE/log.json" "$OUT/log.json"
timeout 90 "$PY" -m training.evaluate --model "$WORK/$SHAPE/model" --ids "$IDS" --texts "$TEXTS" --out "$WORK/eval-$SHAPE" 2>&1 | tail -12
pack "eval-$SHAPE"
# the model itself, if it fits what comes back: at most 4 parts of 15 MiB
tar -C "$WORK/$SHAPE" -cf - model | xz -T0 -2 > "$WORK/model.tar.xz"
if [ "$(stat -c %s "$WORK/model.tar.xz")" -le 60000000 ]; then
  split -b 15728640 -d "$WORK/model.tar.xz" "$OUT/model.tar.xz."
fi
ls -l "$OUT"
