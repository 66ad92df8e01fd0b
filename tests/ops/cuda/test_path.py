"""CudaPath: which class it computes, and when down may start before gate_up has ended."""

from types import SimpleNamespace

import pytest
import torch

from exactmoe import ops
from exactmoe.config import Numerics
from exactmoe.errors import Unsupported
from exactmoe.formats.rows import Rows
from exactmoe.ops import cuda_path
from exactmoe.ops.cuda.experts import Experts
from exactmoe.ops.cuda_path import CudaA8Bf16Path, CudaA8Fp8Path, CudaA8Path, CudaPath
from exactmoe.ops.path import ExpertSettings
from exactmoe.ops.triton_path import TritonPath
from exactmoe.runtime.routes import RouteTable

H = torch.empty(8, 128, dtype=torch.bfloat16)
ROWS, WEIGHT = Rows(H, None), object()
A8_PATHS = (CudaA8Path, CudaA8Bf16Path, CudaA8Fp8Path)


class Calls:
    """A path whose kernels are not launched; `stream` is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[CudaPath]) -> None:
        self.path, self.stream, self.early, self.gate_ups, self.both = kind(), 1, [], [], []
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream)
        )
        monkeypatch.setattr(TritonPath, "route_table", staticmethod(lambda *arguments: None))
        for name, keep in (
            ("gate_up", self.gate_ups.append),
            ("gate_up_down", self.both.append),
            ("down", lambda arguments: self.early.append(arguments[-1])),
        ):
            monkeypatch.setattr(
                cuda_path.experts, name, lambda *arguments, keep=keep: keep(arguments)
            )

    def route(self, routes: RouteTable) -> None:
        self.path.route_table(torch.empty(1, 1, dtype=torch.int32), 4, routes)

    def gate_up(self, routes: RouteTable) -> None:
        if isinstance(self.path, CudaA8Path):
            self.path.gate_up_quantized(ROWS, (WEIGHT,) * 3, routes, H, None, ROWS)
        else:
            self.path.gate_up(ROWS, (WEIGHT, WEIGHT), routes, None, None, H)

    def down(self, routes: RouteTable) -> bool:
        """Whether it may start early."""
        self.path.down(ROWS, WEIGHT, routes, Numerics(), H)
        return self.early[-1]


@pytest.fixture(params=[CudaPath, *A8_PATHS], ids=lambda kind: kind.name)
def calls(request, monkeypatch) -> Calls:
    return Calls(monkeypatch, request.param)


def table() -> RouteTable:
    return RouteTable(*(torch.zeros(1, dtype=torch.int32) for _ in range(3)))


def test_down_starts_early_once_behind_its_gate_up(calls):
    routes = table()
    assert not calls.down(routes)
    for _ in range(2):
        calls.route(routes)
        calls.gate_up(routes)
        assert calls.down(routes)
        assert not calls.down(routes)  # the kernel before is down, which waits for nothing older


def test_not_behind_a_gate_up_of_other_routes(calls):
    first, second = table(), table()
    calls.gate_up(first)
    assert not calls.down(second)
    assert not calls.down(first)


def test_not_behind_another_route_table(calls):
    """Its offsets and slots are new: down would read them before they are written."""
    routes = table()
    calls.gate_up(routes)
    calls.route(routes)
    assert not calls.down(routes)


def test_not_in_the_host_loop(calls):
    """gate_up of each expert, then down of each: all but the last read what an older one wrote."""
    launches = [table() for _ in range(3)]
    for routes in launches:
        calls.gate_up(routes)
    assert [calls.down(routes) for routes in launches] == [False] * 3


def test_streams_are_told_apart(calls):
    routes = table()
    calls.gate_up(routes)
    calls.stream = 2
    assert not calls.down(routes)
    calls.route(routes)
    calls.stream = 1
    assert calls.down(routes)


def test_both_in_one_launch(calls):
    """All of the call is handed on; no down is to start behind it."""
    routes, slots = table(), torch.empty(1)
    settings = ExpertSettings(1.5, Numerics(slot="f32"), H)
    weights = (object(), object(), object())
    calls.path.gate_up_down(ROWS, weights, routes, settings, ROWS, slots)
    ((given, *arrays),) = calls.both
    assert vars(given) == vars(Experts(weights, routes, *settings))
    assert [id(array) for array in arrays] == [id(ROWS), id(ROWS), id(slots)]
    assert not calls.down(routes)


def test_a_launch_of_one_phase_knows_its_class(calls):
    """Of a8 the routing weights too, and all three projections: gate_up quantises for down."""
    routes = table()
    calls.gate_up(routes)
    ((given, *_),) = calls.gate_ups
    a8 = isinstance(calls.path, CudaA8Path)
    assert given.a8 == a8 and (given.routing is H) == a8
    assert given.weights == ((WEIGHT,) * 3 if a8 else (WEIGHT, WEIGHT, None))


def test_each_class_has_a_path_of_its_name():
    """Prepared weights are kept by this name: the paths want other bytes of one bank."""
    for name in ("cuda", "cuda_a8", "cuda_a8_bf16", "cuda_a8_fp8"):
        assert ops.path(name).name == name
    layouts = [ops.path(name).storage.layout for name in ("cuda_a8", "cuda_a8_bf16", "cuda_a8_fp8")]
    assert layouts == ["fragment_fp8", "fragment", "fragment_fp8"]


def test_only_class_a16(monkeypatch):
    calls = Calls(monkeypatch, CudaPath)
    routes, scaled = table(), Rows(H, torch.ones(8, 1))
    with pytest.raises(Unsupported, match="class a16; allowed for a8: a path of a8"):
        calls.path.gate_up(scaled, (WEIGHT, WEIGHT), routes, None, None, H)
    with pytest.raises(Unsupported, match="class a16; allowed for a8: a path of a8"):
        calls.path.gate_up(ROWS, (WEIGHT, WEIGHT), routes, torch.ones(8, 1), None, H)
    with pytest.raises(Unsupported, match="class a16; allowed for a8: a path of a8"):
        calls.path.down(scaled, WEIGHT, routes, Numerics(), H)
    assert calls.gate_ups == calls.early == []
    assert not calls.down(routes)
