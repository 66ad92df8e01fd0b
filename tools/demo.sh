#!/usr/bin/env bash
# What `make demo` runs: both demo checkpoints generate text and prove their bits. No GPU is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
EXACTMOE=${EXACTMOE:-.venv/bin/exactmoe}

say() { printf '\n== %s\n' "$1"; shift; [ $# = 0 ] || printf '   %s\n' "$@"; }
run() { printf '$ exactmoe %s\n' "$(printf '%q ' "$@")"; "$EXACTMOE" "$@"; }

for model in glm5_next deepseek_v4; do
  case $model in
    glm5_next) name="GLM-5-Next, routed experts in NVFP4" ;;
    deepseek_v4) name="DeepSeek-V4, routed experts in MXFP4" ;;
  esac
  say "$name: generate text from demo/$model" \
    "A small model trained on Python's standard library. Its experts stay packed in FP4 in memory."
  run generate "demo/$model" --prompt "def read_file(path):" --max-new-tokens 64
  say "$name: prove the bits" \
    "Each MoE block runs at many widths: alone, in a batch, in a long prompt. The output bytes of a" \
    "token are compared, not its values; one differing bit fails the demo."
  run verify "demo/$model"
done
say "Every MLP block of both models gave one bit pattern per token at every width."
