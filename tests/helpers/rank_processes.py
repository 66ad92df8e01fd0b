"""Functions of tests that run on several gloo ranks at once; nothing of it can hang.

`RankPool` keeps four processes, since each takes seconds to import torch; tests of fewer ranks use
groups of them. `on_ranks` starts processes of their own, for tests that break them.
"""

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = (2, 3, 4)
HOST = "127.0.0.1"
# Of one function on all ranks, and of one collective in it.
SECONDS, COLLECTIVE_SECONDS = 300, 60


def meeting_point() -> dist.TCPStore:
    """Where ranks find each other; this process listens, so nobody can take the port before."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


class RankPool:
    """Four processes that wait for functions."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """function(ranks, *arguments) on ranks 0 to size - 1 -> what each returned.

        Raises:
            AssertionError: a rank raised, with its traceback, or has not ended in time.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, size, arguments))
        answers = [
            pipe.recv() if pipe.poll(SECONDS) else (None, f"no answer after {SECONDS} s")
            for pipe in self._pipes
        ]
        errors = [f"rank {r}: {error}" for r, (_, error) in enumerate(answers) if error]
        if errors:
            self.stop()  # the groups of ranks that have failed are of no use
            raise AssertionError("\n".join(errors))
        return [value for value, _ in answers[:size]]

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        _compile_once()
        context, self._store = mp.get_context("spawn"), meeting_point()
        for rank in range(max(SIZES)):
            here, there = context.Pipe()
            place = there, rank, self._store.port
            process = context.Process(target=_serve, args=place, daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(here)


def _compile_once() -> None:
    """The CPU's kernels go to numba's cache here, so that not every process compiles them."""
    from small_layers import small_layer

    for numerics in ("a16", "a8"):
        layer = small_layer(torch.Generator().manual_seed(1), numerics=numerics)
        layer(torch.zeros(1, layer.config.hidden_size, dtype=torch.bfloat16))


def _serve(pipe: Connection, rank: int, port: int) -> None:
    from exactmoe.parallel.ranks import Ranks

    _join(rank, max(SIZES), port, COLLECTIVE_SECONDS)
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    while True:
        function, size, arguments = pipe.recv()
        if rank >= size:
            pipe.send((None, None))
            continue
        try:
            pipe.send((function(Ranks(group=groups[size]), *arguments), None))
        except Exception:  # noqa: BLE001 - the parent raises it
            pipe.send((None, traceback.format_exc()))


def on_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """function(rank, *arguments) in each of `size` new processes -> what each returned, or None
    where it died. backend "nccl": each has the GPU with its number.
    """
    context, store = mp.get_context("spawn"), meeting_point()
    processes, pipes = [], []
    for rank in range(size):
        here, there = context.Pipe()
        call = (there, (rank, size, store.port, SECONDS, backend), function, arguments)
        processes.append(context.Process(target=_once, args=call, daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    try:
        return [_received(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(pipe: Connection) -> Any:
    assert pipe.poll(SECONDS), f"a rank has not ended after {SECONDS} s"
    try:
        return pipe.recv()
    except EOFError:
        return None


def _once(
    pipe: Connection, place: tuple[int, int, int, float, str], function: Any, arguments: Any
) -> None:
    _join(*place)
    pipe.send(function(place[0], *arguments))


def _join(rank: int, size: int, port: int, seconds: float, backend: str = "gloo") -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
