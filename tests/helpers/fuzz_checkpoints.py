"""Broken checkpoints without end: every one must load, or be refused by one of our errors, in
bounded time and memory.

`python tests/helpers/fuzz_checkpoints.py SECONDS [SEED]` runs for a time and prints findings.
"""

import copy
import faulthandler
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from checkpoint_maker import deepseek_config, deepseek_tensors, glm_config, glm_tensors, write
from exactmoe.checkpoint import Checkpoint, audit, read_layer
from exactmoe.errors import ExactMoEError, Unsupported

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
# A case's peak of resident memory above what the process had when it began. The checkpoints have
# 0.5 MiB; 4 MiB is the most that was seen, in a first case, and nothing in most of them.
MEMORY_MIB = 32
# Of this process's own time (0.02 s is the most that was seen), which no busy machine changes; and
# of the clock, for what waits.
SECONDS, CLOCK_SECONDS = 1.0, 30.0
# What the process may ask for, resident or not, above what it has when it begins. Each reader has
# a stack and an arena of 64 MiB.
ADDRESS_SPACE = 2 << 30

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**18, 10**300, -(10**300), 0.5, 1e308, "", "x",
    "model-00002-of-00002.safetensors", "../config.json", "/dev/zero", "..", ".", "a\0b", "\ud800",
    [], [1], [0, 10**18], [[]], {}, {"a": 1}, float("nan"), float("inf"), "BF16", "U8", "F4",
    [4, 2**62], [2**32, 2**32], "é" * 1000,
)  # fmt: skip


def mutate_json(rng: random.Random, content: Any) -> Any:
    """The same JSON with one value replaced, dropped, doubled or wrapped."""
    content = copy.deepcopy(content)
    spots: list[tuple[Any, Any]] = []
    stack = [content]
    while stack:
        node = stack.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            spots.append((node, key))
            if isinstance(value, dict | list):
                stack.append(value)
    if not spots:
        return rng.choice(VALUES)
    node, key = rng.choice(spots)
    choice = rng.randrange(5)
    if choice == 0:
        del node[key]
    elif choice == 1 and isinstance(node, dict):
        node[rng.choice(["", "x", "__metadata__", str(key) + "x"])] = node.pop(key)
    elif choice == 2:
        other, name = rng.choice(spots)
        node[key] = copy.deepcopy(other[name]) if name in other or isinstance(other, list) else 0
    else:
        node[key] = rng.choice(VALUES)
    return content


def _edit_json(rng: random.Random, path: Path) -> None:
    text = path.read_text()
    choice = rng.randrange(8)
    if choice == 0:
        data = bytearray(text.encode())
        data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
    elif choice == 1:
        path.write_text(text[: rng.randrange(len(text))])
    elif choice == 2:
        path.write_text("[" * 100_000)
    elif choice == 3:
        # A name twice.
        at = text.index("{") + 1
        pair = rng.choice([line for line in text[at:].split(", ") if ":" in line])
        path.write_text(text[:at] + pair.strip("{} \n") + ", " + text[at:])
    else:
        path.write_text(json.dumps(mutate_json(rng, json.loads(text))))


def _edit_header(rng: random.Random, path: Path) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text, values = data[8 : 8 + length].decode(), data[8 + length :]
    choice = rng.randrange(4)
    if choice == 0:
        # One entry twice, perhaps with other content.
        name = rng.choice(list(json.loads(text)))
        entry = json.dumps(mutate_json(rng, json.loads(text)[name]))
        text = "{" + json.dumps(name) + ":" + entry + "," + text.lstrip()[1:]
    else:
        for _ in range(choice):
            text = json.dumps(mutate_json(rng, json.loads(text)))
    raw = text.encode("utf-8", "surrogatepass")
    size = len(raw)
    if rng.random() < 0.2:
        size = rng.choice([0, 1, 2**63, 2**40, 99_999_999, size - 1, size + 1])
    path.write_bytes(size.to_bytes(8, "little") + raw + values)


def _edit_bytes(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    choice = rng.randrange(4)
    if choice == 0:
        del data[rng.randrange(len(data)) :]
    elif choice == 1:
        data += bytes(rng.randrange(1, 100))
    else:
        for _ in range(rng.choice([1, 4, 64])):
            # The header is where bytes decide most.
            high = len(data) if choice == 2 else min(len(data), 20_000)
            data[rng.randrange(high)] = rng.randrange(256)
    path.write_bytes(bytes(data))


def _edit_folder(rng: random.Random, path: Path) -> None:
    """Files that are gone, folders, links to outside, or copies under a second name."""
    victim = rng.choice(sorted(path.parent.iterdir()))
    choice = rng.randrange(4)
    if choice == 0:
        victim.unlink()
    elif choice == 1:
        victim.unlink()
        victim.mkdir()
    elif choice == 2:
        victim.unlink()
        victim.symlink_to(rng.choice(["/dev/zero", "nothing", victim.name, "config.json"]))
    elif victim.is_file():  # no link to a device, which has no end
        shutil.copy(victim, path.parent / rng.choice(["model.safetensors", "x.safetensors"]))


EDITS: dict[str, tuple[str, Callable[[random.Random, Path], None]]] = {
    "config": ("config.json", _edit_json),
    "index": (INDEX, _edit_json),
    "header": (SHARD, _edit_header),
    "bytes": (SHARD, _edit_bytes),
    "folder": (SHARD, _edit_folder),
}


def originals(folder: Path) -> list[Path]:
    """Two sound checkpoints of two shards."""
    rng = torch.Generator().manual_seed(1)
    return [
        write(folder / "glm", glm_config(), glm_tensors(rng), shards=2),
        write(folder / "deepseek", deepseek_config(), deepseek_tensors(rng), shards=2),
    ]


def use(path: Path) -> None:
    """All that a load reads."""
    checkpoint = Checkpoint(path)
    audit(checkpoint).text()
    for layer in range(checkpoint.family.num_layers):
        read_layer(checkpoint, layer)


def case(seed: int, sound: list[Path], folder: Path) -> str | None:
    """One broken checkpoint; a traceback where it was not refused as it should be."""
    rng = random.Random(seed)
    broken = folder / "broken"
    shutil.copytree(rng.choice(sound), broken)
    edits = rng.choices(list(EDITS), k=rng.choice([1, 1, 1, 2]))
    before = _from_now_on()
    started, own = time.monotonic(), time.process_time()
    for name in edits:
        file, edit = EDITS[name]
        if not (broken / file).is_file():  # by an edit before: gone, or a link to a device
            continue
        with suppress(ValueError, RecursionError, LookupError, OSError):
            edit(rng, broken / file)
    try:
        use(broken)
    except ExactMoEError as error:
        # Refused by the machine, not for what it is: one with more memory would have given it.
        if isinstance(error, Unsupported) and "has no room" in str(error):
            return f"seed {seed} ({', '.join(edits)}): {error}"
    except BaseException:  # noqa: BLE001 (a panic of safetensors is no Exception; all are reported)
        return f"seed {seed} ({', '.join(edits)}):\n{traceback.format_exc()}"
    finally:
        shutil.rmtree(broken)
    grown = _mib("VmHWM") - before
    clock, seconds = time.monotonic() - started, time.process_time() - own
    if grown > MEMORY_MIB or seconds > SECONDS or clock > CLOCK_SECONDS:
        return (
            f"seed {seed} ({', '.join(edits)}): {grown:.0f} MiB, {seconds:.1f} s of its own, "
            f"{clock:.1f} s"
        )
    return None


def _from_now_on() -> float:
    """Resident MiB now; VmHWM is the peak since this call (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _mib("VmRSS")


def _mib(name: str) -> float:
    """A size of this process, by the operating system."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


def _hung(seed: int) -> None:
    """Ends a run whose case waits for ever, which no limit after the case would see."""
    print(f"seed {seed}: it still waits after {CLOCK_SECONDS:.0f} s", flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


def main(seconds: float, seed: int) -> int:
    """Cases until the time is over; the exit status is 1 when one was not refused."""
    torch.set_num_threads(1)
    # A blow-up becomes a MemoryError, which names its place.
    most = int(_mib("VmSize") * 2**20) + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    findings, count, end = 0, 0, time.monotonic() + seconds
    largest = longest = 0.0
    with tempfile.TemporaryDirectory() as name:
        sound = originals(Path(name))
        while time.monotonic() < end:
            watch = threading.Timer(CLOCK_SECONDS, _hung, [seed + count])
            watch.daemon = True
            watch.start()
            before, own = _mib("VmRSS"), time.process_time()
            finding = case(seed + count, sound, Path(name))
            longest = max(longest, time.process_time() - own)
            largest = max(largest, _mib("VmHWM") - before)
            watch.cancel()
            count += 1
            if finding is not None:
                findings += 1
                print(finding, flush=True)
    most_of_one = f"at most {largest:.1f} MiB and {longest:.2f} s of its own"
    print(f"{count} broken checkpoints, {findings} findings; {most_of_one}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
