#!/usr/bin/env bash
# Builds the CPU kernels in place (src/headrace/ops/cpu/_native*.so), for work with PYTHONPATH=src.
# Usage: scripts/build_native.sh [python]     needs nanobind, cmake and ninja beside that Python
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-${PYTHON:-python3}}
bin=$(dirname "$("$python" -c 'import sys; print(sys.executable)')")
PATH="$bin:$PATH"
mkdir -p build
build=build/native-$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
mkdir -p build
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
cmake --build "$build" --parallel 2
if compgen -G "$build/_native*" >/dev/null; then
  cp "$build"/_native*.so src/headrace/ops/cpu/
else
  echo "no C++ compiler: nothing was built" >&2
  exit 1
fi
