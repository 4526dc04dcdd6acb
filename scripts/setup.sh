#!/usr/bin/env bash
# Makes a working checkout: a virtual environment, torch, the other requirements, the project itself
# (editable) and its C++ extension. Running it again is quick. `--dev` adds the tools for tests.
#
#   PYTHON=python3.12     the interpreter to create .venv from
#   TORCH_SPEC=torch==2.13.0   what to install where no torch is importable yet
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dev=0
[ "${1:-}" = "--dev" ] && dev=1
say() { printf '%s\n' "setup: $*" >&2; }

# 1. An environment: the active one, else .venv, created on top of a Python that has torch already.
if ! py="$(bash scripts/find_python.sh 2>/dev/null)"; then
  base="$(bash scripts/find_python.sh --base)"
  flags=()
  if "$base" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
    flags+=(--system-site-packages)
    say "creating .venv from $base, which has torch"
  else
    say "creating .venv from $base"
  fi
  if ! "$base" -m venv ${flags[@]+"${flags[@]}"} .venv; then
    rm -rf .venv
    say "could not create .venv with $base -m venv"
    say "hint: install the venv module of your system's Python, or activate a virtual environment first"
    exit 1
  fi
  py="$PWD/.venv/bin/python"
fi
"$py" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  say "$py is Python $("$py" -c 'import platform; print(platform.python_version())'); Headrace needs 3.11 to 3.13"
  say "hint: activate an environment with one of these, or set PYTHON and remove .venv"
  exit 1
}

# 2. What was done before, for these requirements on this interpreter with this torch?
torch_version() {
  "$py" - <<'PY'
import importlib.metadata, importlib.util
print(importlib.metadata.version("torch") if importlib.util.find_spec("torch") else "")
PY
}
key() {
  { cat pyproject.toml scripts/requirements.py; pwd; echo "$dev"; "$py" -V; torch_version; } | cksum | tr ' ' '-'
}
stamp="$("$py" -c 'import sys; print(sys.prefix)')/headrace-setup-$dev.stamp"

if [ "$(cat "$stamp" 2>/dev/null)" != "$(key)" ]; then
  # `uv venv` makes environments without pip: use uv's own there.
  if "$py" -m pip --version >/dev/null 2>&1; then
    install() { "$py" -m pip install --disable-pip-version-check --root-user-action=ignore "$@"; }
  elif command -v uv >/dev/null 2>&1; then
    install() { uv pip install --python "$py" "$@"; }
  else
    "$py" -m ensurepip >/dev/null
    install() { "$py" -m pip install --disable-pip-version-check --root-user-action=ignore "$@"; }
  fi

  # 3. torch: keep what is there.
  version="$(torch_version)"
  if [ -z "$version" ]; then
    spec="${TORCH_SPEC:-torch==2.13.0}"
    say "installing $spec (TORCH_SPEC overrides; the README says how to avoid the CUDA build)"
    if [ -t 2 ]; then install "$spec"; else install --quiet "$spec"; fi
    version="$(torch_version)"
  else
    say "keeping torch $version"
  fi
  "$py" - "$version" <<'PY' || exit 1
import re, sys
major, minor = map(int, re.match(r"(\d+)\.(\d+)", sys.argv[1]).groups())
if not (2, 11) <= (major, minor) < (2, 14):
    sys.exit(f"setup: torch {sys.argv[1]} is installed; Headrace needs torch>=2.11,<2.14\n"
             "setup: hint: use another virtual environment, or change torch there yourself")
PY

  # 4. Everything else, with torch held at its version; then the project, which adds nothing more.
  mkdir -p build
  printf 'torch==%s\n' "$version" > build/constraints.txt
  extras=(--extra build)
  [ "$dev" = 1 ] && extras=(--extra dev)
  "$py" scripts/requirements.py "${extras[@]}" > build/requirements.txt
  say "installing $(wc -l < build/requirements.txt | tr -d ' ') requirements"
  install --quiet -r build/requirements.txt -c build/constraints.txt
  install --quiet --no-deps -e .
  key > "$stamp"
fi

# 5. The C++ extension, beside its Python files. Incremental: a second run compiles nothing.
if [ -f scripts/build_native.sh ]; then
  if command -v "${CXX:-c++}" >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1; then
    mkdir -p build
    if PATH="$(dirname "$py"):$PATH" PYTHON="$py" bash scripts/build_native.sh > build/native.log 2>&1; then
      say "the C++ extension is built"
    elif [ "$dev" = 1 ]; then
      tail -n 40 build/native.log >&2
      say "the C++ extension did not build (build/native.log has everything)"
      exit 1
    else
      say "the C++ extension did not build (build/native.log says why); the slower PyTorch kernels serve"
    fi
  else
    say "no C++ compiler found; the slower PyTorch kernels serve"
    say "hint: install one (g++ or clang) and run 'make setup' again"
  fi
fi
say "ready: $py"
