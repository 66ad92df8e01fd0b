#!/usr/bin/env bash
# Makes $VENV with torch, exactmoe (editable) and its test and dev tools. Called by `make setup`.
# Reads PYTHON, VENV, TORCH_VERSION, TORCH, TORCH_INDEX, TRANSFORMERS (see the Makefile).
# A stamp in the environment records what it was made from; nothing is done while that holds.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH_VERSION=${TORCH_VERSION:-2.13.0}
CPU_INDEX=https://download.pytorch.org/whl/cpu

fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }

has_nvidia_driver() {
  [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1
}

version=$("$PYTHON" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
  fail "cannot run PYTHON=$PYTHON; name a Python 3.11 to 3.14, as in: make setup PYTHON=python3.12"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' ||
  fail "$PYTHON is Python $version; ExactMoE needs 3.11 to 3.14, as in: make setup PYTHON=python3.12"

# A "+cpu" pin can never resolve to the CUDA build of several GB.
if [ -n "${TORCH:-}" ]; then
  torch=$TORCH
elif [ "$(uname -s)" = Linux ] && ! has_nvidia_driver; then
  torch=torch==$TORCH_VERSION+cpu
else
  torch=torch==$TORCH_VERSION
fi
# A CPU build of torch brings no GPU compiler; the tests interpret and compile kernels with these.
case $torch in
  *+cpu) index=${TORCH_INDEX-$CPU_INDEX} extras=test,dev,compile ;;
  *) index=${TORCH_INDEX-} extras=test,dev,cuda ;;
esac

base="python $version, $torch, index ${index:-none}, ${TRANSFORMERS:-transformers of pyproject.toml}"
project=$(cksum <pyproject.toml)
stamp=$VENV/.made_from
made_base="" made_project=""
if [ -f "$stamp" ]; then
  { read -r made_base && read -r made_project; } <"$stamp" || made_base=""
elif [ -d "$VENV" ] && ! [ -f "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
  fail "VENV=$VENV is a folder with other things in it; name one that is empty or does not exist"
fi
if [ "$made_base" = "$base" ] && [ "$made_project" = "$project" ]; then
  exit 0
fi

# Another torch in the same environment could pass for the wanted one, so a new base starts afresh.
printf 'setup: making %s: %s\n' "$VENV" "$base"
if [ "$made_base" != "$base" ]; then
  "$PYTHON" -m venv --clear "$VENV" ||
    fail "$PYTHON could not make a virtual environment (on Debian: apt install python3-venv)"
fi
rm -f "$stamp"

# No byte-compiling of whole packages: most of their files are never imported.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { pip install -qq --no-compile "$@"; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if [[ $torch != *+cpu ]]; then
  install ${index:+--extra-index-url "$index"} "$torch" ||
    fail "$torch could not be installed; see pip's message above"
# pip's own indexes first: a mirror or a local wheel may serve the build and the index be out of reach.
elif ! install --no-deps "$torch" 2>"$log"; then
  [ -n "$index" ] && install --no-deps --timeout 15 --retries 2 --index-url "$index" "$torch" 2>>"$log" || {
    cat "$log" >&2
    fail "the CPU build $torch was found neither in pip's own indexes nor at" \
      "  TORCH_INDEX=${index:-(none)}; pip's messages are above. Choose one:" \
      "  make setup TORCH_INDEX=URL                       another index that serves CPU builds" \
      "  make setup TORCH=torch==$TORCH_VERSION                     the default build, with CUDA: several GB"
  }
fi

# torch is named again so that no other requirement can replace the build just installed.
install "$torch" ${TRANSFORMERS:+"$TRANSFORMERS"} --editable ".[$extras]" ||
  fail "the packages of pyproject.toml could not be installed; see pip's message above"
printf '%s\n' "$base" "$project" >"$stamp"
