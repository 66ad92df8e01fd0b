"""Ranks: the processes of torch.distributed that run one model together.

Everything that crosses ranks goes through here: moves of bytes, one sum of integer words, and
objects at start. All ranks call the same of it in the same order; sizes are fixed, so nothing is
read on the host. A failure says which rank does not answer, where that can be found out.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from exactmoe.errors import ConfigError, RankLost, Unsupported
from exactmoe.runtime.devices import current, resolve

TIMEOUT = timedelta(minutes=10)
# After a failure: how long the ranks that live have to say so.
_GRACE_SECONDS = 3.0
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())


class Ranks:
    """This process and its peers.

    Args:
        device: of this rank: "cpu" (gloo), or a GPU (nccl).
        group: a process group; None: the default one.

    Attributes:
        rank: number of this process in the group, from 0.
        size: how many there are.
        device: of this rank.
        backend: of the group on this device.

    Raises:
        ConfigError: torch.distributed is not initialised, or this process is not in the group.
        Unsupported: the group has no backend for this device.
    """

    def __init__(
        self, device: str | torch.device = "cpu", group: dist.ProcessGroup | None = None
    ) -> None:
        if not dist.is_available():
            raise Unsupported(f"torch {torch.__version__} is built without torch.distributed")
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; allowed: a process that torchrun started "
                "(torchrun --nproc-per-node 2 ...), or torch.distributed.init_process_group(...) "
                "before"
            )
        if dist.get_rank(group) < 0:
            raise ConfigError("this process is not in the group; allowed: one of its ranks")
        self.device, self.group = resolve(device), group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.backend = _backend_of(group, self.device.type)
        self._broken: str | None = None

    @classmethod
    def auto(cls, device: str = "cpu", timeout: timedelta = TIMEOUT) -> "Ranks":
        """The ranks that torchrun started, or the default group where one is initialised already.

        Args:
            device: "cpu", or "cuda": the GPU with the number of this rank on its machine.
            timeout: how long a rank waits for the others before it fails; not used for a group
                that exists.

        Raises:
            ConfigError: neither torchrun nor the caller made a group, or no GPU is left for this
                rank.
        """
        if device == "cuda" and dist.is_available() and launched():
            torch.cuda.set_device(resolve(f"cuda:{_local_rank()}"))
        if dist.is_available() and not dist.is_initialized() and dist.is_torchelastic_launched():
            kind = torch.device(device).type
            dist.init_process_group(_BACKENDS[kind], timeout=timeout)
        return cls(device)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.backend}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # a process group cannot be copied

    def __reduce__(self) -> NoReturn:
        raise Unsupported(
            "a layer over ranks was pickled; allowed: to load it again on every rank (its "
            "process group lives in this process only)"
        )

    def all_gather(self, mine: Tensor, everyone: Tensor) -> None:
        """The bytes of each rank's `mine`, by rank, into `everyone` on all of them."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        target, source = _bytes(everyone), _bytes(mine)
        self._run("all_gather", lambda: gather(target, source, group=self.group))

    def exchange(self, to_each: Tensor, from_each: Tensor) -> None:
        """Part r of `to_each` goes to rank r, part r of `from_each` comes from it; equal parts."""
        target, source = _bytes(from_each), _bytes(to_each)
        self._run("exchange", lambda: dist.all_to_all_single(target, source, group=self.group))

    def merge(self, words: Tensor) -> None:
        """int32, in place: of words that are 0 on all ranks but one, that one, on all ranks.

        It is a sum of integers with at most one that is not 0, so nothing is rounded and no order
        of the ranks shows.
        """
        self._run("merge", lambda: dist.all_reduce(words, group=self.group))

    def merge_own(self, words: Tensor, mine: Tensor) -> None:
        """As `merge`, but rank r gets part r of the words only."""
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._run("merge_own", lambda: scatter(mine, words, group=self.group))

    def objects(self, mine: Any) -> list[Any]:
        """What each rank gave, by rank. Waits for all; for starts and checks, not for calls.

        Raises:
            RankLost: a rank raised an error in `together` instead; the message has it.
        """
        found = self._told((mine, None))
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(found) if error]
        if failed:
            raise RankLost(f"another rank has failed: {'; '.join(failed)}")
        return [value for value, _ in found]

    def _told(self, mine: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
        """A value, or the error that a rank met, of each rank."""
        found: list[Any] = [None] * self.size
        self._run("objects", lambda: dist.all_gather_object(found, mine, group=self.group))
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that fails on all ranks if it fails on one: the others would wait for it in vain.
        Inside, ranks talk by `objects` and `agree` only.

        Raises:
            RankLost: another rank raised an error; the message has it.
        """
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            self._told((None, f"{type(error).__name__}: {error}"))
            raise
        self.objects(None)

    def agree(self, what: str, fields: Mapping[str, Any]) -> None:
        """Compare some facts of every rank with each other.

        Raises:
            ConfigError: on every rank, if one has another value; names the field and its values.
        """
        texts = self.objects({name: repr(value) for name, value in fields.items()})
        for name in dict.fromkeys(name for text in texts for name in text):
            values = [text.get(name, "not given") for text in texts]
            if len(set(values)) > 1:
                raise ConfigError(
                    f"{what}: the ranks disagree about {name}: {_by_rank(values)}; allowed: the "
                    "same on every rank"
                )

    def _run(self, what: str, call: Callable[[], object]) -> None:
        if self._broken is not None:
            raise RankLost(f"{what}: {self._broken}; allowed: to start all ranks again")
        try:
            with current(self.device):  # where objects travel through NCCL
                call()
        except RuntimeError as error:
            self._broken = f"the ranks lost each other at an earlier {what}"
            raise RankLost(
                f"{what} failed on {self}: {self._who_is_lost()}: {_first_line(error)}"
            ) from error

    def _who_is_lost(self) -> str:
        """Each rank that lives says so in the store; who doesn't is named."""
        try:
            store = dist.distributed_c10d._get_default_store()
            group = self.group or dist.group.WORLD
            name = "default" if group is None else group.group_name
            store.set(f"exactmoe/heard/{name}/{dist.get_rank()}", "yes")
            missing = dist.get_process_group_ranks(self.group)
            end = time.monotonic() + _GRACE_SECONDS
            while missing and time.monotonic() < end:
                missing = [r for r in missing if not store.check([f"exactmoe/heard/{name}/{r}"])]
                time.sleep(0.05)
        except RuntimeError:
            return "the rank that holds the store (rank 0, or torchrun) does not answer"
        if not missing:
            return "every rank answers, so one was late, or they have not called the same"
        names = ", ".join(map(str, missing))
        return f"rank{'s' * (len(missing) > 1)} {names} died or does not answer"


def _local_rank() -> int:
    return dist.get_node_local_rank(fallback_rank=dist.get_rank() if dist.is_initialized() else 0)


def _backend_of(group: dist.ProcessGroup | None, kind: str) -> str:
    """The backend of a group for a type of device, from "cpu:gloo,cuda:nccl"."""
    text = str(dist.get_backend_config(group))
    pairs = dict(part.split(":") for part in text.split(",") if ":" in part)
    found = pairs.get(kind)
    if found is None or (kind == "cuda" and found != _BACKENDS["cuda"]):
        raise Unsupported(
            f"the group's backends are {text!r}, this rank is on {kind}; allowed there: "
            f"{_BACKENDS[kind]!r}"
        )
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of a contiguous tensor: gloo and NCCL know not every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _by_rank(values: list[str]) -> str:
    """Equal values together: "rank 0, 2: 'a16'; rank 1: 'a8'"."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"rank {', '.join(where)}: {value}" for value, where in ranks.items())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
