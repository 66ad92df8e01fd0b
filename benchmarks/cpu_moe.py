"""Routed experts on the CPU: ours on packed NVFP4 beside transformers' eager bf16 experts.

    python benchmarks/cpu_moe.py --tokens 1 16 --threads 2

Both hold the same weights (theirs dequantised and rounded to bf16). Times are medians; calls take
turns over fresh selections of experts. The error is the relative L2 distance from float64 on the
packed weights, for the first tokens.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts

from exactmoe import ExpertBank, MoEConfig, MoELayer, PackedWeight
from exactmoe.formats import dequantize

TRUTH_TOKENS = 2
ROTATED = 8  # selections of experts, so that no cache holds the next call's weights


def random_weight(experts: int, rows: int, columns: int, rng: torch.Generator) -> PackedWeight:
    """NVFP4 bytes of roughly normal weights, without quantising gigabytes."""
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=rng)
    scale_shape = (experts, rows, columns // 16)
    scales = torch.randint(0x40, 0x58, scale_shape, dtype=torch.uint8, generator=rng)
    global_scale = torch.full((experts,), 1 / (16 * columns**0.5))
    return PackedWeight("nvfp4", codes, scales, global_scale)


def one_expert(weight: PackedWeight, expert: int) -> Tensor:
    """One expert's true weights, float64 [N, K]."""
    part = slice(expert, expert + 1)
    assert weight.scales is not None and weight.global_scale is not None
    single = PackedWeight(
        weight.format, weight.codes[part], weight.scales[part], weight.global_scale[part]
    )
    return dequantize(single)[0]


def eager_experts(bank: ExpertBank, top_k: int) -> torch.nn.Module:
    """transformers' experts in bf16, holding the dequantised weights of the bank."""
    config = Glm4MoeConfig(
        hidden_size=bank.hidden_size,
        moe_intermediate_size=bank.intermediate_size,
        n_routed_experts=bank.num_experts,
        num_experts_per_tok=top_k,
    )
    config._experts_implementation = "eager"
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    experts = Glm4MoeExperts(config)
    torch.set_default_dtype(default)
    with torch.no_grad():
        for e in range(bank.num_experts):
            fused = torch.cat([one_expert(bank.gate, e), one_expert(bank.up, e)])
            experts.gate_up_proj[e].copy_(fused)
            experts.down_proj[e].copy_(one_expert(bank.down, e))
    return experts


def truth(bank: ExpertBank, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """float64 [T, H] of the first tokens."""
    result = torch.zeros(len(x), bank.hidden_size, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            row = x[token].double()
            gate, up = one_expert(bank.gate, expert) @ row, one_expert(bank.up, expert) @ row
            h = gate * torch.sigmoid(gate) * up
            result[token] += weight * (one_expert(bank.down, expert) @ h)
    return result


Inputs = tuple[Tensor, Tensor, Tensor]  # x, expert ids, weights


def random_inputs(tokens: int, args: argparse.Namespace, rng: torch.Generator) -> Inputs:
    """x bfloat16 [T, H], distinct ids [T, K], weights float32 [T, K] that sum to 1."""
    x = torch.randn(tokens, args.hidden, generator=rng).bfloat16()
    weights, ids = torch.rand(tokens, args.experts, generator=rng).topk(args.top_k)
    return x, ids, weights / weights.sum(-1, keepdim=True)


def medians(
    calls: list[Callable[..., Tensor]], inputs: list[Inputs], seconds: float, pause: float
) -> list[float]:
    """Median seconds of each call; they take turns over the inputs, at least once each.

    A pause before each call: behind a call of torch's its OpenMP threads spin for some milliseconds
    and take a core from whoever comes next, which would be ours only.
    """
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call(*inputs[0])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < len(inputs):
        given = inputs[len(times[0]) % len(inputs)]
        for call, taken in zip(calls, times, strict=True):
            time.sleep(pause)
            start = time.perf_counter()
            call(*given)
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def processor() -> str:
    """The processor's name, as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each width")
    pause = "ms before a call, in which torch's OpenMP threads stop spinning"
    parser.add_argument("--pause", type=float, default=20.0, help=pause)
    parser.add_argument("--numerics", default="a16", choices=["a16", "a8"])
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    """Times both at every width and prints a table."""
    args = arguments()
    torch.set_num_threads(args.threads)
    rng = torch.Generator().manual_seed(0)
    hidden, inner, experts = args.hidden, args.intermediate, args.experts
    gate, up = (random_weight(experts, inner, hidden, rng) for _ in range(2))
    bank = ExpertBank(gate, up, random_weight(experts, hidden, inner, rng))
    config = MoEConfig(hidden, inner, experts, args.top_k, numerics=args.numerics)
    layer = MoELayer(config, bank)
    eager = eager_experts(bank, args.top_k)
    print(f"{processor()}, {args.threads} threads, torch {torch.__version__}")
    print(f"H {hidden}, I {inner}, {experts} experts, top {args.top_k}, {args.numerics}, NVFP4")
    as_bf16 = 2 * 3 * hidden * inner * experts
    print(
        f"experts in memory: {bank.nbytes / as_bf16:.3f} of their bf16 bytes; "
        f"workspace {layer.workspace_bytes() / 2**20:.0f} MiB ({layer.limits.max_rows} rows)"
    )
    print("tokens  ours ms  eager bf16 ms  faster  our error  eager error")
    for tokens in args.tokens:
        inputs = [random_inputs(tokens, args, rng) for _ in range(ROTATED)]
        ours, theirs = medians([layer.experts, eager], inputs, args.seconds, args.pause / 1e3)
        few = tuple(part[:TRUTH_TOKENS] for part in inputs[0])
        true = truth(bank, *few)
        errors = [
            float((call(*few).double() - true).norm() / true.norm())
            for call in (layer.experts, eager)
        ]
        print(
            f"{tokens:6} {ours * 1e3:8.2f} {theirs * 1e3:14.2f} {theirs / ours:6.2f}x "
            f"{errors[0]:10.1e} {errors[1]:12.1e}"
        )


if __name__ == "__main__":
    main()
