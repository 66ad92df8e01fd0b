"""Loading beside plain reads of the same bytes, in numbers of the operating system.

    python benchmarks/loading.py --folder /tmp/loading --gib 8        # makes the checkpoints too
    python benchmarks/loading.py --folder /tmp/loading --gib 8 --warm # with the page cache as it is
    python benchmarks/loading.py --folder /tmp/loading --gib 4 --model
    python benchmarks/loading.py --folder /tmp/loading --gib 4 --warm --card cuda:0

Each measurement is a process of its own. Seconds are the least of interleaved rounds; peak RSS is
VmHWM of /proc/self/status, bytes read are rchar of /proc/self/io (what read calls returned) and
read_bytes (what came from the disk). Nothing is dropped from the page cache of other files.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent.parent / "tests" / "helpers"
DIALECTS = {"one set per expert": "modelopt", "stacked [E, ...]": "stacked-nvfp4"}
MODES = {
    "plain reads": "plain",
    "plain reads, kept": "kept",
    "load, 1 card": "one",
    "load, 2 cards": "two",
    "card 0 of 2 alone": "card0",
    "card 1 of 2 alone": "card1",
}
MODEL_MODES = {
    "plain reads": "plain",
    "plain reads, kept": "kept",
    "load_model, 1 card": "model",
    "load_model, 2 cards": "models",
}
GPU_MODES = {
    "plain reads": "plain",
    "plain reads, kept": "kept",
    "pinned copies, nothing read": "copy",
    "load to the card, two layers at a time": "stream",
    "load to the card, layer by layer": "read",
    "load and make layers": "layers",
}
PIECE = 8 << 20


def status(name: str) -> int:
    """A value of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def drop(folder: Path) -> None:
    """Takes the files of the folder out of the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measured(folder: Path, mode: str, card: str, cold: bool) -> dict[str, Any]:
    """One measurement, in this process."""
    from exactmoe.checkpoint import Checkpoint, audit, read_layer
    from exactmoe.checkpoint.load import HOST
    from exactmoe.checkpoint.reader import default_threads

    if card != "cpu":
        wake(card)
    if mode.startswith("model"):
        import_model()
    checkpoint = Checkpoint(folder)
    report = audit(checkpoint)
    consumed = [entry.info for entry in (*report.consumed, *report.ignored)]
    pieces = list(cut(consumed))
    if cold:
        drop(folder)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    base, before, start = status("VmRSS"), io(), time.perf_counter()
    if mode in ("plain", "kept"):
        kept: Any = plain(folder, pieces, default_threads(), keep=mode == "kept")
    elif mode.startswith("model"):
        kept = [import_model()(folder, cards=("cpu",) * (1 + mode.endswith("s")), progress=False)]
    elif mode == "stream":
        kept = streamed(checkpoint, card)
    elif mode == "copy":
        kept = copies(card, sum(piece[2] for piece in pieces))
    elif card != "cpu":
        kept = to_card(checkpoint, card, mode == "layers")
    else:
        shares = {"one": lambda _: (HOST,), "two": both}.get(mode, alone(int(mode[-1] == "1")))
        layers = range(checkpoint.family.num_layers)
        kept = [
            read_layer(checkpoint, n, shares=shares(checkpoint.family.layer(n))) for n in layers
        ]
    seconds, after = time.perf_counter() - start, io()
    nbytes = sum(map(resident, kept))
    on_card = mode in ("copy", "stream", "read", "layers")
    return {
        "seconds": seconds,
        "peak": status("VmHWM") - base,
        "on_host": 0 if on_card else nbytes,
        "on_card": nbytes if on_card else 0,
        "layer": max(resident(layer) for layer in kept) if kept else 0,
        "rchar": after["rchar"] - before["rchar"],
        "disk": after["read_bytes"] - before["read_bytes"],
        "needed": sum(info.nbytes for info in consumed),
        "experts": sum(i.nbytes for i in consumed if ".experts." in i.name),
        "threads": default_threads(),
        "card_peak": card_peak(card),
    }


def import_model() -> Any:
    """load_model; transformers and what it imports is no part of a load."""
    from exactmoe.hf import load_model

    return load_model


def wake(card: str) -> None:
    """What the first use of a card costs is no part of a load."""
    import torch

    torch.empty(1 << 20, device=card).zero_()
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).to(card)
    torch.cuda.synchronize(card)
    torch.cuda.reset_peak_memory_stats(card)


def card_peak(card: str) -> int:
    import torch

    return 0 if card == "cpu" else torch.cuda.max_memory_allocated(card)


def copies(card: str, nbytes: int) -> list[Any]:
    """As many bytes as a load has, from one pinned buffer to memory of the card."""
    import torch

    source = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(nbytes, dtype=torch.uint8, device=card)
    for start in range(0, nbytes, PIECE):
        piece = memory[start : start + PIECE]
        piece.copy_(source[: len(piece)], non_blocking=True)
    torch.cuda.synchronize(card)
    return [memory]


def streamed(checkpoint: Any, card: str) -> list[Any]:
    """All projections through one reader, as load_model: the next layer comes while one is looked
    at. Routers and what else is small come layer by layer.
    """
    import torch

    from exactmoe.checkpoint import plan_layer
    from exactmoe.checkpoint.reader import Reader

    device, kept, begun = torch.device(card), [], []
    with Reader(checkpoint) as reader:
        for number in range(checkpoint.family.num_layers):
            plan = plan_layer(checkpoint, number)
            begun.append(
                [
                    pending
                    for part in (plan.experts, plan.dense)
                    for pending in reader.begin(part, None, device).values()
                ]
            )
            kept += [reader.tensor(info, device) for info in plan.router.values()]
            if len(begun) > 1:
                kept += [pending.finish() for pending in begun.pop(0)]
        kept += [pending.finish() for each in begun for pending in each]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return kept


def to_card(checkpoint: Any, card: str, layers: bool) -> list[Any]:
    """All layers on a card; `layers`: made, so that the bytes are in the order of the kernels."""
    import torch

    from exactmoe.checkpoint import MoEWeights, Share, read_layer
    from exactmoe.config import Placement
    from exactmoe.load import make_layer

    kept: list[Any] = []
    for number in range(checkpoint.family.num_layers):
        weights = read_layer(checkpoint, number, shares=(Share(torch.device(card)),))
        kept.append(weights)
        if layers and isinstance(weights, MoEWeights):
            make_layer(weights, Placement((card,)))
    torch.cuda.synchronize(card)
    return kept


def cut(infos: list[Any]) -> Iterator[tuple[str, int, int]]:
    """(file, start, bytes) of all tensors, neighbours together, at most PIECE each."""
    runs: list[list[Any]] = []
    for info in sorted(infos, key=lambda info: (info.file, info.offset)):
        if runs and runs[-1][0] == info.file and runs[-1][2] == info.offset:
            runs[-1][2] += info.nbytes
        else:
            runs.append([info.file, info.offset, info.offset + info.nbytes])
    for file, begin, end in runs:
        for start in range(begin, end, PIECE):
            yield file, start, min(PIECE, end - start)


def plain(folder: Path, pieces: list[tuple[str, int, int]], threads: int, keep: bool) -> list[Any]:
    """preadv into a buffer of each thread, or into memory that stays."""
    import torch

    files = {file: os.open(folder / file, os.O_RDONLY) for file in {piece[0] for piece in pieces}}
    memory = torch.empty(sum(p[2] for p in pieces) if keep else 0, dtype=torch.uint8)
    starts = [0]
    for _, _, nbytes in pieces:
        starts.append(starts[-1] + nbytes)

    def read(numbers: range) -> None:
        buffer = torch.empty(PIECE, dtype=torch.uint8)
        for number in numbers:
            file, start, nbytes = pieces[number]
            target = memory[starts[number] : starts[number + 1]] if keep else buffer[:nbytes]
            done = 0
            while done < nbytes:
                done += os.preadv(files[file], [memoryview(target.numpy())[done:]], start + done)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, [range(n, len(pieces), threads) for n in range(threads)]))
    for descriptor in files.values():
        os.close(descriptor)
    return [memory] if keep else []


def both(spec: Any) -> Any:
    """The shares of two cards."""
    import torch

    from exactmoe.bank import Partition
    from exactmoe.checkpoint import shares_of
    from exactmoe.checkpoint.load import HOST

    if spec.moe is None:
        return (HOST,)
    return shares_of(Partition.even(spec.moe.num_experts, 2), [torch.device("cpu")] * 2)


def alone(card: int) -> Callable[[Any], Any]:
    """The share of one of two cards."""
    return lambda spec: (both(spec)[-1 if card else 0],)


def resident(weights: Any) -> int:
    """Bytes of a layer's weights, or of a tensor."""
    if hasattr(weights, "parameters"):
        return sum(t.nbytes for t in (*weights.parameters(), *weights.buffers()))
    if hasattr(weights, "config"):
        shared = 0 if weights.shared is None else weights.shared.nbytes
        router = sum(buffer.nbytes for buffer in weights.router.buffers())
        return int(weights.bank.nbytes) + router + shared
    return int(weights.nbytes)


def run(folder: Path, mode: str, card: str, cold: bool) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    command = [sys.executable, __file__, "--measure", mode, "--folder", str(folder), "--card", card]
    done = subprocess.run([*command, *([] if cold else ["--warm"])], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{mode} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def table(title: str, found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    gb = 1e9
    heads = "s | GB/s | x plain | x kept | read GB | of experts | peak - resident GiB"
    yield f"| {title} | {heads} | card's peak - resident GiB |"
    yield "|---|---|---|---|---|---|---|---|---|"
    least = {name: min(rounds, key=lambda r: r["seconds"]) for name, rounds in found.items()}
    rates = {name: max(r["rchar"], moved(r)) / r["seconds"] for name, r in least.items()}
    for name, r in least.items():
        here = max(each["peak"] - each["on_host"] for each in found[name]) / 2**30
        there = max(each["card_peak"] - each["on_card"] for each in found[name]) / 2**30
        read = r["rchar"] - (r["needed"] - r["experts"])
        cells = [
            name,
            f"{r['seconds']:.2f}",
            f"{rates[name] / gb:.2f}",
            f"{rates['plain reads'] / rates[name]:.2f}",
            f"{rates['plain reads, kept'] / rates[name]:.2f}",
            f"{r['rchar'] / gb:.3f}",
            f"{100 * read / r['experts']:.1f} %" if read > 0 else "",
            f"{here:.2f}",
            f"{there:.2f}" if r["card_peak"] else "",
        ]
        yield f"| {' | '.join(cells)} |"


def moved(result: dict[str, Any]) -> int:
    """Bytes that a measurement moved without reading them."""
    return int(result["needed"]) if result["rchar"] < result["needed"] // 4 else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--layout", choices=("all", *DIALECTS.values()), default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--card", default="cpu", help="a GPU: load to it")
    parser.add_argument("--model", action="store_true", help="load_model of a whole model")
    parser.add_argument("--warm", action="store_true", help="leave the page cache as it is")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(given.folder, given.measure, given.card, not given.warm)))
        return
    sys.path.insert(0, str(HELPERS))
    from synthetic_checkpoints import Synthetic, sized, write_synthetic

    def make(folder: Path, dialect: str) -> None:
        start = time.perf_counter()
        if dialect == "model":
            from synthetic_models import write_model

            write_model(folder, sized(Synthetic(), given.gib))
        else:
            write_synthetic(folder, sized(Synthetic(dialect=dialect), given.gib))
        print(f"{folder} made in {time.perf_counter() - start:.0f} s", file=sys.stderr)

    cache = "as it is" if given.warm else "files dropped before each run"
    print(f"{os.cpu_count()} CPU cores ({processor()}), Python {platform.python_version()}, "
          f"{given.rounds} rounds, page cache: {cache}")  # fmt: skip
    kinds = {"a whole model": "model"} if given.model else DIALECTS
    kinds = {title: name for title, name in kinds.items() if given.layout in ("all", name)}
    for title, dialect in kinds.items():
        folder = given.folder / dialect
        if not (folder / "config.json").exists():
            make(folder, dialect)
        modes = MODES if given.card == "cpu" else GPU_MODES
        modes = MODEL_MODES if given.model else modes
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in modes}
        for _ in range(given.rounds):
            for name, mode in modes.items():
                found[name].append(run(folder, mode, given.card, not given.warm))
        one = next(each[0] for name, each in found.items() if name.startswith("load"))
        layer = "" if given.model else f"layer {one['layer'] / 2**20:.0f} MiB, "
        print(f"\n{title}: {one['needed'] / 2**30:.2f} GiB, {layer}"
              f"{one['threads']} readers\n")  # fmt: skip
        print("\n".join(table(title, found)))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(": ")[1] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    main()
