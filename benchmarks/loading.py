"""Loading beside plain reads of the same bytes, in numbers of the operating system.

    python benchmarks/loading.py --folder /tmp/loading --gib 8        # makes the checkpoints too
    python benchmarks/loading.py --folder /tmp/loading --gib 8 --warm # with the page cache as it is

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


def measured(folder: Path, mode: str, cold: bool) -> dict[str, Any]:
    """One measurement, in this process."""
    from exactmoe.checkpoint import Checkpoint, audit, read_layer
    from exactmoe.checkpoint.load import HOST
    from exactmoe.checkpoint.reader import default_threads

    checkpoint = Checkpoint(folder)
    consumed = [entry.info for entry in audit(checkpoint).consumed]
    pieces = list(cut(consumed))
    if cold:
        drop(folder)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    base, before, start = status("VmRSS"), io(), time.perf_counter()
    if mode in ("plain", "kept"):
        kept: Any = plain(folder, pieces, default_threads(), keep=mode == "kept")
    else:
        shares = {"one": lambda _: (HOST,), "two": both}.get(mode, alone(int(mode[-1] == "1")))
        layers = range(checkpoint.family.num_layers)
        kept = [
            read_layer(checkpoint, n, shares=shares(checkpoint.family.layer(n))) for n in layers
        ]
    seconds, after = time.perf_counter() - start, io()
    return {
        "seconds": seconds,
        "peak": status("VmHWM") - base,
        "resident": sum(map(resident, kept)),
        "layer": max(resident(layer) for layer in kept) if kept else 0,
        "rchar": after["rchar"] - before["rchar"],
        "disk": after["read_bytes"] - before["read_bytes"],
        "needed": sum(info.nbytes for info in consumed),
        "experts": sum(i.nbytes for i in consumed if ".experts." in i.name),
        "threads": default_threads(),
    }


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
    if hasattr(weights, "config"):
        shared = 0 if weights.shared is None else weights.shared.nbytes
        router = sum(buffer.nbytes for buffer in weights.router.buffers())
        return int(weights.bank.nbytes) + router + shared
    return int(weights.nbytes)


def run(folder: Path, mode: str, cold: bool) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    command = [sys.executable, __file__, "--measure", mode, "--folder", str(folder)]
    done = subprocess.run([*command, *([] if cold else ["--warm"])], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{mode} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def table(title: str, found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    gb = 1e9
    yield f"| {title} | s | GB/s | x plain | x kept | read GB | of experts | peak - resident GiB |"
    yield "|---|---|---|---|---|---|---|---|"
    least = {name: min(rounds, key=lambda r: r["seconds"]) for name, rounds in found.items()}
    rates = {name: r["rchar"] / r["seconds"] for name, r in least.items()}
    for name, r in least.items():
        peak = max(each["peak"] - each["resident"] for each in found[name]) / 2**30
        others = r["needed"] - r["experts"]
        share = (r["rchar"] - others) / r["experts"]
        yield (
            f"| {name} | {r['seconds']:.2f} | {r['rchar'] / r['seconds'] / gb:.2f} | "
            f"{rates['plain reads'] / rates[name]:.2f} | "
            f"{rates['plain reads, kept'] / rates[name]:.2f} | {r['rchar'] / gb:.3f} | "
            f"{100 * share:.1f} % | {peak:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave the page cache as it is")
    parser.add_argument("--measure", choices=tuple(MODES.values()), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(given.folder, given.measure, not given.warm)))
        return
    sys.path.insert(0, str(HELPERS))
    from synthetic_checkpoints import Synthetic, sized, write_synthetic

    cache = "as it is" if given.warm else "files dropped before each run"
    print(f"{os.cpu_count()} CPU cores ({processor()}), Python {platform.python_version()}, "
          f"{given.rounds} rounds, page cache: {cache}")  # fmt: skip
    for title, dialect in DIALECTS.items():
        folder = given.folder / dialect
        if not (folder / "config.json").exists():
            start = time.perf_counter()
            write_synthetic(folder, sized(Synthetic(dialect=dialect), given.gib))
            print(f"{folder} made in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in MODES}
        for _ in range(given.rounds):
            for name, mode in MODES.items():
                found[name].append(run(folder, mode, not given.warm))
        one = found["load, 1 card"][0]
        print(f"\n{title}: {one['needed'] / 2**30:.2f} GiB, layer {one['layer'] / 2**20:.0f} MiB, "
              f"{one['threads']} readers\n")  # fmt: skip
        print("\n".join(table(title, found)))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(": ")[1] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    main()
