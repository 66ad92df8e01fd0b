"""Tokens per second of the demo models: packed and run here, beside transformers in bf16.

    python benchmarks/demo_tokens.py --threads 2

transformers holds the same weights, dequantised to bf16, with its default experts and the router
gate in f32. Both generate the same number of tokens greedily; medians of runs in turns.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

import exactmoe
from exactmoe.hf.adapter import keep_rows_bf16

DEMO = Path(__file__).resolve().parent.parent / "demo"
MODELS = ("glm5_next", "deepseek_v4")
PROMPT = "def read_file(path):"


@torch.no_grad()
def main() -> None:
    """Times both demo models and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sys.path.insert(0, str(DEMO))
    from evaluate import load_dequantised, with_exact_gate

    print(f"torch {torch.__version__}, {args.threads} threads, {args.new_tokens} new tokens")
    print("model         here tokens/s  transformers bf16 tokens/s  faster")
    for name in MODELS:
        folder = DEMO / name
        ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
        models = (
            exactmoe.load_model(folder, progress=False),
            with_exact_gate(load_dequantised(folder)),
        )
        keep_rows_bf16(models[1])
        times: list[list[float]] = [[], []]
        for run in range(args.runs + 1):
            for model, taken in zip(models, times, strict=True):
                start = time.perf_counter()
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    min_new_tokens=args.new_tokens,
                    max_new_tokens=args.new_tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
                if run:  # the first one compiles
                    taken.append(time.perf_counter() - start)
        here, theirs = (args.new_tokens / statistics.median(taken) for taken in times)
        print(f"{name:12} {here:14.1f} {theirs:27.1f} {here / theirs:6.2f}x")


if __name__ == "__main__":
    main()
