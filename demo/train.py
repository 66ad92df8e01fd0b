"""Train one demo model for a given time and save its bf16 original.

`python demo/train.py --family glm5_next --data DIR --out DIR --seconds 430`; DIR of `--data` is
made by corpus.py. The learning rate follows elapsed time, so a slower machine trains fewer steps on
the same schedule.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from continuations import continue_greedily, prompts, tally
from corpus import BOS_ID
from linear_attention import solved_linear_attention
from models import (
    FAMILIES,
    fill_hash_tables,
    load_original,
    make_model,
    routers,
    run_in_f32,
    save_original,
)
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

SEQUENCE = 512
WARMUP, FINAL = 0.02, 0.02
BIAS_STEP = 1e-3
EVALUATIONS = 10


def all_experts(
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    routing_weights: torch.Tensor,
) -> torch.Tensor:
    """Every expert on every token, the unselected with weight 0: (tokens, H) -> (tokens, H).

    Without the gathers, sorts and host syncs that would dominate at this size. `expert_ids` and
    `routing_weights` are (tokens, top_k).
    """
    num_experts, double, hidden = experts.gate_up_proj.shape
    weights = hidden_states.new_zeros(len(hidden_states), num_experts, dtype=routing_weights.dtype)
    weights = weights.scatter(1, expert_ids, routing_weights)
    gate_up = F.linear(hidden_states, experts.gate_up_proj.view(-1, hidden)).view(
        -1, num_experts, double
    )
    inner = experts._apply_gate(gate_up) * weights[..., None].to(gate_up.dtype)
    down = experts.down_proj.transpose(1, 2).reshape(num_experts * double // 2, hidden)
    return inner.flatten(1) @ down


class LoadBalancer:
    """Counts the tokens of each expert and moves the correction bias by the sign of the lack."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.routers = routers(model)
        self.loads: dict[str, torch.Tensor] = {}
        for name, router in self.routers.items():
            router.register_forward_hook(
                lambda module, _, output, name=name: self.count(name, module, output[2])
            )

    def count(self, name: str, router: torch.nn.Module, expert_ids: torch.Tensor) -> None:
        """Add one call's (tokens, top_k) ids to the load of router `name`."""
        ones = torch.ones_like(expert_ids, dtype=torch.float32).flatten()
        load = torch.zeros(router.num_experts, device=expert_ids.device).scatter_add_(
            0, expert_ids.flatten(), ones
        )
        self.loads[name] = self.loads.get(name, 0) + load

    def move(self, step: float) -> None:
        """One update of every correction bias; hash layers have none. Starts a new count."""
        for name, router in self.routers.items():
            if hasattr(router, "e_score_correction_bias"):
                lack = self.loads[name].mean() - self.loads[name]
                router.e_score_correction_bias += step * lack.sign()
        self.loads.clear()

    def relative(self) -> dict[str, list[float]]:
        """Load of each expert over the layer's mean, per router. Starts a new count."""
        result = {name: (load / load.mean()).tolist() for name, load in self.loads.items()}
        self.loads.clear()
        return result


def windows(tokens: torch.Tensor, batch: int) -> torch.Tensor:
    """(batch, SEQUENCE + 1) random windows; half begin with bos, so that prompts from mid-file look
    familiar.
    """
    starts = torch.randint(len(tokens) - SEQUENCE - 1, (batch,), device=tokens.device)
    rows = tokens[starts[:, None] + torch.arange(SEQUENCE + 1, device=tokens.device)].long()
    rows[: batch // 2, 0] = BOS_ID
    return rows


def token_loss(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the last SEQUENCE tokens of each row."""
    with torch.autocast(rows.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: PreTrainedModel, tokens: torch.Tensor, batch: int) -> float:
    """Mean loss over the held-out text in windows of SEQUENCE."""
    rows = tokens[: len(tokens) // (SEQUENCE + 1) * (SEQUENCE + 1)].view(-1, SEQUENCE + 1).long()
    losses = [token_loss(model, part).item() * len(part) for part in rows.split(batch)]
    return sum(losses) / len(rows)


def make_optimizer(model: PreTrainedModel, peak: float, device: str) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors and the embedding do not."""
    trained = [
        (n, p) for n, p in model.named_parameters() if ".visual." not in n and ".indexer." not in n
    ]
    plain = [p for n, p in trained if p.ndim < 2 or "embed_tokens" in n]
    decayed = [p for n, p in trained if p.ndim >= 2 and "embed_tokens" not in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device == "cuda")


def rate(fraction: float) -> float:
    """Share of the peak learning rate at `fraction` of the time: linear warmup, then cosine to
    FINAL.
    """
    if fraction < WARMUP:
        return max(fraction / WARMUP, 0.01)
    along = min((fraction - WARMUP) / (1 - WARMUP), 1.0)
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * along))


def train(
    model: PreTrainedModel, data: dict[str, torch.Tensor], arguments: argparse.Namespace
) -> list[dict]:
    """Train in place; returns the curve as one dictionary an evaluation."""
    optimizer = make_optimizer(model, arguments.peak, arguments.device)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    balancer, curve, running = LoadBalancer(model), [], []
    start, step, next_evaluation = time.monotonic(), 0, 0.1
    while True:
        fraction = (time.monotonic() - start) / arguments.seconds
        for group in optimizer.param_groups:
            group["lr"] = arguments.peak * rate(fraction)
        loss = token_loss(model, windows(data["train"], arguments.batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balancer.move(BIAS_STEP if fraction < 0.8 else BIAS_STEP / 5)
        step += 1
        running.append(loss.detach())
        if step in (10, 50) or fraction >= next_evaluation:
            next_evaluation += (fraction >= next_evaluation) / EVALUATIONS
            row = {
                "step": step,
                "seconds": round(time.monotonic() - start, 1),
                "tokens": step * arguments.batch * SEQUENCE,
                "train": round(torch.stack(running).mean().item(), 4),
                "heldout": round(heldout_loss(model, data["heldout"], arguments.batch), 4),
            }
            row["most_loaded"] = {n: round(max(load), 2) for n, load in balancer.relative().items()}
            running.clear()
            curve.append(row)
            print(json.dumps(row), flush=True)
        if fraction >= 1:
            return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder made by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the bf16 original")
    parser.add_argument("--seconds", type=float, required=True, help="training time")
    parser.add_argument("--start", type=Path, help="bf16 original to go on from")
    parser.add_argument("--batch", type=int, default=32, help=f"rows of {SEQUENCE} tokens a step")
    parser.add_argument("--peak", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ExpertsInterface.register("all_experts", all_experts)
    tokens = {
        name: np.load(arguments.data / f"{name}.npy").astype(np.int32)
        for name in ("train", "heldout")
    }
    data = {name: torch.from_numpy(row).to(arguments.device) for name, row in tokens.items()}
    if arguments.start:
        model = load_original(arguments.start).float()
    else:
        model = make_model(arguments.family)
        fill_hash_tables(
            model,
            np.bincount(tokens["train"], minlength=model.get_input_embeddings().num_embeddings),
        )
    model.to(arguments.device).train()
    model.set_experts_implementation("all_experts")
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "_hc", "hc_head")):
            run_in_f32(module)
    with solved_linear_attention():
        curve = train(model, data, arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_original(model, arguments.data / "tokenizer", arguments.out)
    (arguments.out / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(arguments.out)
    # bf16 weights, f32 arithmetic: transformers 5.17 cannot run the DeepSeek architecture in bf16.
    saved = (
        load_original(arguments.out, experts_implementation="eager").float().to(arguments.device)
    )
    results = continue_greedily(saved, tokenizer, prompts(tokenizer))
    (arguments.out / "continuations.json").write_text(json.dumps(results, indent=1) + "\n")
    print(arguments.family, tally(results), flush=True)


if __name__ == "__main__":
    main()
