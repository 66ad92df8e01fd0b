"""The emulator itself: small kernels, right and wrong in ways that a card would not tell."""

import re
from pathlib import Path

import pytest
import torch

import emulate
from emulate import EmulatorError
from emulated_kernels import COLLECTIVES, NUMBERS, PTX, RELAY, RING, WORDS
from exactmoe.formats.scales import decode_e4m3

pytestmark = pytest.mark.skipif(emulate.missing() is not None, reason=str(emulate.missing()))
THREADS = 64


def words(count: int, value: int = -1) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int32)


def number(value: int):
    return emulate.ctypes.c_uint32(value)


def relay(fault: int, seed: int, blocks: int = 3) -> torch.Tensor:
    """Block 0 writes x + 1, the others copy it when a flag says so, and write it doubled."""
    x, data, flag = torch.arange(THREADS, dtype=torch.int32), words(THREADS), words(1, 0)
    out = words(THREADS * (blocks - 1))
    arguments = [x, data, flag, out, number(fault)]
    memory = {"data": data, "flag": flag, "out": out}
    grid = (blocks, 1, THREADS)
    emulate.run(PTX + RELAY, "relay", grid, 2048, arguments, {"x": x}, memory, seed)
    return out.view(-1, THREADS)


@pytest.mark.parametrize("seed", range(8))
def test_blocks_meet_through_a_flag(seed):
    for fault in (0, 1):
        assert torch.equal(relay(fault, seed), (torch.arange(THREADS).int() + 1).expand(2, -1) * 2)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (2, "race on byte 0 of data.*read by bulk copy.*write by warp 0.*proxy fence is missing"),
        (3, r"race on byte \d+ of data: the read by bulk copy"),  # no barrier ahead of the release
        (4, r"race on byte \d+ of data: the read by bulk copy"),  # no release
        (5, r"race on byte 0 of flag: the write by warp 0"),  # no atomic
        (6, "deadlock.*\n.*block 1: barrier_wait.*threads 1-63\n.*the value stays 1 at relay.cpp"),
        (7, "store: 4 bytes of global memory out of range: byte 256 of data, which has 256, at "),
        (8, "store: writes x, which was given to be read only, at relay.cpp"),
        (9, "copy_bulk: 264 bytes from .* all are multiples of 16"),
        (10, "barrier_arrive: the barrier at .* expects 1 arrivals a phase, and phase 0 has them"),
        (11, "its block ends, and a copy is still on its way, from relay.cpp"),
    ],
)
def test_a_wrong_relay_is_named(fault, message):
    with pytest.raises(EmulatorError, match=message):
        relay(fault, 1)


def ring(fault: int, seed: int) -> torch.Tensor:
    """Warp 1 fills two stages by bulk copies, warp 0 adds up what comes."""
    x, out = torch.arange(32 * 6, dtype=torch.int32), words(32)
    emulate.run(
        PTX + RING, "ring", (1, 1, 64), 1024, [x, out, number(fault)], {"x": x}, {"out": out}, seed
    )
    return out


@pytest.mark.parametrize("seed", range(8))
def test_a_ring_of_copies_works_in_every_order(seed):
    assert torch.equal(ring(0, seed), torch.arange(32 * 6).view(6, 32).sum(0).int())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, "race on byte .* the write by bulk copy|phase 0 has them all"),  # no wait: empty
        (2, "race on byte .* of dynamic shared memory: .* the read by warp 0"),  # no wait: full
        (3, "race on|deadlock"),  # parity of the other phase
        (4, "race on byte .*: the (write by bulk copy|read by warp 0)"),  # given back, then read
        (5, "deadlock.*\n.*barrier_wait of barrier"),  # a copy too few
        (6, "copy_bulk: at shared address .* there is no barrier"),
        (7, "copy_bulk: shared bytes .* hold the barrier at"),
        (8, "load: shared address .* is no multiple of 4"),
        (9, "load: shared bytes .* allowed: "),
    ],
)
def test_a_wrong_ring_is_named(fault, message):
    with pytest.raises(EmulatorError, match=message):
        ring(fault, 2)


def collectives(fault: int, seed: int) -> torch.Tensor:
    out = words(12 * 32)
    emulate.run(
        PTX + COLLECTIVES,
        "collectives",
        (1, 1, 64),
        512,
        [out, number(fault)],
        {},
        {"out": out},
        seed,
    )
    return out.view(12, 32)


@pytest.mark.parametrize("seed", range(4))
def test_lanes_exchange_as_cuda_says(seed):
    out, lane = collectives(0, seed), torch.arange(32).int()
    assert torch.equal(out[0], (lane * 3).roll(-5)[:1].expand(32))
    assert torch.equal(out[1], torch.where(lane >= 2, lane * 3 - 6, lane * 3))
    assert torch.equal(out[2], torch.where(lane < 28, lane * 3 + 12, lane * 3))
    assert torch.equal(out[3], (lane ^ 8) * 3)
    assert torch.equal(out[4], torch.full((32,), sum(1 << i for i in range(0, 30, 3))).int())
    assert torch.equal(out[5], torch.full((32,), 64).int())  # atomicAdd of both warps
    assert torch.equal(out[6], (31 - lane).int())  # the other warp's, behind __syncthreads
    assert torch.equal(out[7].view(torch.float32), (lane ^ 1) * 0.5)
    # Four matrices of 8 x 8 halves, each transposed: row r of matrix m has lanes' column r.
    given = (lane[:, None, None] * 8 + torch.arange(4)[:, None] * 2 + torch.arange(2)).int()
    matrices = given.permute(1, 0, 2).reshape(4, 8, 8).transpose(1, 2).reshape(4, 32, 2)
    stored = out[8:12].contiguous().view(torch.int16).view(4, 32, 2).int()
    assert torch.equal(stored, matrices)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, "_sync with mask ffffffff at .*, while other lanes of the warp are in __"),
        (2, "deadlock.*\n.*a collective of the warp"),
        (3, r"sync_threads\(3, 64\): others are there for 32 threads|.*\(3, 32\): .* 64 threads"),
        (4, "race on byte .* of __shared__ variables: the (read|write) by warp"),
        (5, "shared_address of .* which is not shared memory"),
    ],
)
def test_wrong_collectives_are_named(fault, message):
    with pytest.raises(EmulatorError, match=message):
        collectives(fault, 3)


def numbers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Float32 bits [T] each -> uint32 bits [rows of WORDS, T]."""
    count = a.numel()
    out = words(len(WORDS) * count)
    arguments = [a, b, out, number(count)]
    emulate.run(
        PTX + NUMBERS, "numbers", (1, 1, 32), 0, arguments, {"a": a, "b": b}, {"out": out}, 0
    )
    return out.view(len(WORDS), count)


def test_numbers_are_rounded_as_ptx_says(rng):
    """Against torch's conversions, and products of bf16 in float64."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=rng).int()
    edges = [0.0, -0.0, 448.0, 464.0, 463.9, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 1e30, float("inf")]
    a = torch.cat((bits.view(torch.float32), torch.tensor(edges), torch.randn(512, generator=rng)))
    b = a.flip(0).contiguous()
    found = dict(zip(WORDS, numbers(a, b), strict=True))
    known = ~a.isnan() & ~b.isnan()
    bf16 = found["round_bf16x2"].view(torch.bfloat16).view(-1, 2)
    assert torch.equal(bf16[known].float(), torch.stack((a, b), 1)[known].bfloat16().float())
    assert (found["round_bf16x2"][a.isnan()] & 0xFFFF == 0x7FC0).all()
    clamped = a.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
    assert torch.equal(found["round_e4m3x2"][known] & 0xFF, clamped[known])
    codes = found["round_e4m3x2"] & 0xFF
    wide = found["e4m3x2_to_bf16x2"].view(torch.bfloat16)[::2].float()
    assert torch.equal(wide[known], decode_e4m3(codes[known].byte()) * 256)
    exact = (a.bfloat16().double() * b.bfloat16().double())[known]
    product = found["times_low"].view(torch.bfloat16)[::2][known]
    finite = exact.abs() < 2.0**120
    assert torch.equal(product[finite].double(), rounded_to_bf16(exact[finite]))
    assert torch.equal(found["min_nan"].view(torch.float32)[known], torch.minimum(a, b)[known])
    assert torch.equal(found["max_nan"].view(torch.float32)[known], torch.maximum(a, b)[known])
    assert (found["min_nan"][~known] == 0x7FFFFFFF).all()
    assert (found["permute"] == 0x00FF0102).all()


def rounded_to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Float64 to the nearest bf16, ties to even, subnormals kept."""
    exponent = torch.frexp(values)[1].clamp(min=-125) - 8
    return torch.ldexp(torch.ldexp(values, -exponent).round(), exponent)


def test_the_machine_has_every_function_of_ptx():
    folder = Path(emulate.__file__).parent / "emulator"
    text = "".join((folder / name).read_text() for name in ("device.h", "arithmetic.h"))
    wanted = re.findall(r"^__device__ __forceinline__ \w+ (\w+)\(", PTX, re.M)
    found = re.findall(r"^inline \w+ (\w+)\(", text, re.M)
    assert set(wanted) - set(found) == set()
    assert len(wanted) > 30


def test_text_that_the_machine_does_not_know_is_refused():
    with pytest.raises(EmulatorError, match="does not hold ptx.cuh"):
        emulate.emulated_text("void f() {}", "f")
    with pytest.raises(EmulatorError, match="instruction in: .* asm volatile..nanosleep"):
        emulate.emulated_text(PTX + 'void f() { asm volatile("nanosleep.u32 1;"); }', "f")
