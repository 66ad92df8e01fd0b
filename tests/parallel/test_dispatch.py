"""What cards send each other: its sizes, what goes wrong on the way, and what `explain` says."""

import copy
import dataclasses
import inspect
import pickle

import pytest
import torch

from card_layers import on_cards
from exactmoe import Limits, MoEConfig, MoELayer, Placement
from exactmoe.bank import Partition
from exactmoe.errors import BitMismatch, ConfigError, Unsupported
from exactmoe.ops import DECODED, DEVICE
from exactmoe.ops.cards import TorchCards
from exactmoe.ops.cpu_path import CpuPath
from exactmoe.parallel import Cards, dispatch
from exactmoe.parallel import placement as placing
from exactmoe.parallel.cards import Traffic
from exactmoe.parallel.dispatch import copy_over
from exactmoe.plan import architectures
from exactmoe.runtime.lanes import HostLane
from layers import assert_same_bits, layer_of, random_bank, random_call
from small_layers import small_layer

CPU = torch.device("cpu")
EVEN = Partition.even(8, 2)
ODD = Partition.of_lists([[0, 2, 4, 6], [1, 3, 5, 7]], 8)


def cards_of(partition: Partition, returns: str) -> Cards:
    return Cards(partition, (CPU,) * partition.num_cards, returns)


def published(numerics: str, experts: int, top_k: int) -> MoEConfig:
    return MoEConfig(4096, 2048, experts, top_k, numerics=numerics)


@pytest.mark.parametrize(
    ("rows", "out", "back"),
    [
        (1, 4_272, 98_304),
        (6, 25_632, 589_824),
        (32, 136_704, 3_145_728),
        (512, 2_187_264, 50_331_648),
    ],
)
def test_traffic_of_the_seed(rows, out, back):
    """DeepSeek-V4's expert layer on two cards, top-6, e4m3 rows, slots float32."""
    config = published("a8", 256, 6)
    assert cards_of(Partition.even(256, 2), "slots").traffic(rows, config, DEVICE) == Traffic(
        out, back
    )


def test_partial_vectors_are_4_to_6_times_less():
    glm, deepseek = published("a16", 288, 8), published("a8", 256, 6)
    for config, factor in ((glm, 4), (deepseek, 6)):
        even = Partition.even(config.num_experts, 2)
        slots, partials = (
            cards_of(even, returns).traffic(9, config, DEVICE).back
            for returns in ("slots", "partials")
        )
        assert slots == factor * partials == 9 * 4096 * 4 * factor
    three = cards_of(Partition.even(256, 3), "slots").traffic(1, deepseek, DEVICE)
    assert three == Traffic(2 * 4_272, 2 * 98_304)


def test_bytes_that_are_copied_are_those_of_the_closed_form(rng, monkeypatch):
    sent = []

    def counting(source, target, what):
        if not what.startswith("count"):  # of served slots: one word a peer
            sent.append((what.split()[0], source.nbytes))
        return copy_over(source, target, what)

    for numerics in ("a16", "a8"):
        layer = small_layer(rng, numerics=numerics)
        x = torch.randn(5, layer.config.hidden_size, generator=rng).bfloat16()
        for partition in (EVEN, Partition.even(8, 4), ODD):
            for returns in ("slots", "partials"):
                cards = on_cards(layer, partition, returns)
                sent.clear()
                with monkeypatch.context() as patch:
                    patch.setattr("exactmoe.parallel.dispatch.copy_over", counting)
                    cards(x)
                back = sum(size for what, size in sent if what in ("slots", "vector"))
                out = sum(size for what, size in sent) - back
                found = cards.cards.traffic(5, layer.config, DECODED)
                assert (out, back) == (found.out, found.back)


def test_workspace_is_a_closed_form_of_every_card():
    """The owner's landing place, and a peer's message, slots and scratch, by hand: 2 of 4 experts,
    1 token, top-2, hidden and inner 128, `a8`; each array is rounded up to 64 bytes.
    """
    layer = layer_of(
        random_bank(torch.Generator().manual_seed(1), "nvfp4", 4, 128, 128),
        2,
        "cpu",
        numerics="a8",
        limits=Limits(max_rows=1),
    )
    cards = on_cards(layer, Partition.even(4, 2), "slots", limits=Limits(max_rows=1))
    block = 512 + 64 + 64 + 64 + 64 + 64 + 512 + 64  # x, ids, token id, weights, logits, codes
    experts = 64 + 64 + 1024 + 1024 + 1024 + 64  # offsets, sorted, h, slots, codes and scales of h
    owner = 64 + 64 + 1024  # what it looks up, served, returned
    peer = 64 + 512 + 64 + 64 + 64 + 64  # looked up, codes and scales of x, ids, weights, fault
    assert cards.workspace_bytes() == block + experts + owner + experts + peer
    assert cards.workspace_bytes_on(CPU) == cards.workspace_bytes()


def test_lost_slots_are_found_at_the_next_check(rng):
    """A table that forgets an expert: the card takes it for another's."""
    layer = layer_of(random_bank(rng, "nvfp4", 8, 64, 64), 2, "cpu")
    x, ids, weights = random_call(rng, layer, 5)
    ids[2, 1] = 5
    for returns in ("slots", "partials"):
        cards = on_cards(layer, EVEN, returns, limits=Limits())
        cards.experts(x, ids, weights)
        cards.check()
        local = cards.cards.tables[1].local
        was = int(local[6])
        local[6] = -1
        cards.experts(x, ids, weights)
        with pytest.raises(BitMismatch, match="have not served each slot once"):
            cards.check()
        cards.check()  # said once
        local[6] = was
        assert_same_bits(cards.experts(x, ids, weights), layer.experts(x, ids, weights))
        cards.check()


def test_twice_served_and_lost_slots_do_not_cancel_over_calls(rng):
    layer = layer_of(random_bank(rng, "nvfp4", 8, 64, 64), 1, "cpu")
    x = torch.randn(1, 64, generator=rng).bfloat16()
    cards = on_cards(layer, EVEN, limits=Limits())
    cards.cards.tables[1].local[6] = -1  # expert 5: no card
    cards.cards.tables[0].local[7] = 0  # expert 6: two cards
    for expert in (5, 6):
        cards.experts(x, torch.tensor([[expert]]), torch.ones(1, 1))
    with pytest.raises(BitMismatch, match="not served each slot once"):
        cards.check()


STEPS = ["copy_over", "mark", "wait", "begin", "end", "put", "route_table", "gate_up", "down"]
STEPS += ["look_up", "take_slots", "count_served"]


def home_of(step: str) -> object:
    if step == "copy_over":
        return dispatch
    if step in ("mark", "wait", "begin", "end", "put"):
        return HostLane
    return CpuPath if hasattr(CpuPath, step) else TorchCards


@pytest.mark.parametrize("numerics", ["a16", "a8"])
@pytest.mark.parametrize("returns", ["slots", "partials"])
def test_an_error_at_any_step(rng, monkeypatch, numerics, returns):
    """Copy, kernel or event: lanes are drained, calls are refused until a reset, then right."""
    layer = small_layer(rng, numerics=numerics)
    x = torch.randn(6, layer.config.hidden_size, generator=rng).bfloat16()
    expected = layer(x)
    cards = on_cards(layer, EVEN, returns)
    drained = []
    monkeypatch.setattr(HostLane, "drain", lambda lane: drained.append(lane))
    for step in [*STEPS, *(["quantize"] if numerics == "a8" else [])]:
        if step == "take_slots" and returns == "partials":
            continue
        home, number = home_of(step), 0
        original = inspect.getattr_static(home, step)
        function = getattr(original, "__func__", original)
        while True:
            calls: list = []

            def failing(*args, calls=calls, number=number, function=function):
                calls.append(args)
                if len(calls) == number + 1:
                    raise RuntimeError("planted")
                return function(*args)

            kind = staticmethod if isinstance(original, staticmethod) else lambda f: f
            with monkeypatch.context() as patch:
                patch.setattr(home, step, kind(failing))
                drained.clear()
                try:
                    cards(x)
                except RuntimeError as error:
                    assert str(error) == "planted"
                else:
                    break  # so many such steps there are not
            if drained:
                assert len(drained) == 2
                with pytest.raises(Unsupported, match=r"failed \(RuntimeError: planted\); allowed"):
                    cards(x)
                cards.reset()
            else:
                assert step in ("quantize",), (
                    step
                )  # before the cards have work: nothing is under way
            number += 1
            assert_same_bits(cards(x), expected, f"after {step} {number}")
        assert number >= 1, step


def test_what_goes_wrong_while_lanes_are_drained_is_told(rng, monkeypatch):
    layer = small_layer(rng)
    cards = on_cards(layer, EVEN)
    x = torch.zeros(1, 64).bfloat16()

    def broken(lane):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(HostLane, "drain", broken)
        patch.setattr(HostLane, "mark", lambda lane: 1 / 0)
        with pytest.raises(ZeroDivisionError) as found:
            cards(x)
        assert found.value.__notes__ == [
            f"draining card {card} on cpu failed: the device is lost" for card in (0, 1)
        ]
        with pytest.raises(Unsupported, match="the device is lost; .*allowed: a new process"):
            cards.reset()
    with pytest.raises(Unsupported, match=r"failed \(ZeroDivisionError: division by zero\)"):
        cards(x)
    cards.reset()
    cards(x)


def test_serial_is_one_card_after_the_other(rng, monkeypatch):
    """Else every gate_up is queued before any down."""
    layer, order = small_layer(rng), []
    for name in ("gate_up", "down"):
        original = getattr(CpuPath, name)

        def seen(*args, name=name, original=original):
            order.append(name)
            original(*args)

        monkeypatch.setattr(CpuPath, name, staticmethod(seen))
    x = torch.randn(2, 64, generator=rng).bfloat16()
    for serial, wanted in (
        (True, ["gate_up", "down"] * 2),
        (False, ["gate_up"] * 2 + ["down"] * 2),
    ):
        order.clear()
        on_cards(layer, EVEN, serial=serial)(x)
        assert order == wanted


def test_copies_are_checked():
    with pytest.raises(
        ConfigError, match=r"x of card 1: torch.float32 \(3,\) is sent into torch.f"
    ):
        copy_over(torch.zeros(3), torch.zeros(4), "x of card 1")
    with pytest.raises(ConfigError, match=r"is sent into torch.int32 \(3,\)"):
        copy_over(torch.zeros(3), torch.zeros(3, dtype=torch.int32), "x of card 1")


def test_returns(rng):
    layer = small_layer(rng)
    assert on_cards(layer, EVEN).placement.returns == "partials"
    assert on_cards(layer, ODD).placement.returns == "slots"  # four vectors would be more
    assert on_cards(layer, Partition.even(8, 3)).placement.returns == "slots"
    shared = Partition.even(8, 2)
    nine = layer_of(random_bank(rng, "nvfp4", 17, 64, 64), 2, "cpu")
    with pytest.raises(ConfigError, match=r"cuts through groups \[0\] of the combine; allowed"):
        on_cards(nine, Partition((0, *([1] * 16))), "partials")
    assert on_cards(nine, Partition.even(17, 2), "partials").cards.subtrees == (
        ((0, 4),),
        ((4, 4),),
    )
    assert shared.is_aligned


def test_placement(rng):
    layer = small_layer(rng)
    config, bank = layer.config, layer.bank
    before = bank.gate_codes.clone()
    cards = MoELayer(config, bank, cards=["cpu", "cpu"])
    assert cards.placement == Placement(("cpu", "cpu"), EVEN.owners, "partials", False)
    assert_same_bits(bank.gate_codes, before)  # the caller's bank stays
    split = bank.split(ODD, ["cpu", "cpu"], keep=True)
    assert MoELayer(config, split).placement.partition == ODD.owners
    assert MoELayer(config, split, cards=["cpu", "cpu"]).placement.partition == ODD.owners
    for placement, message in (
        (Placement(("cpu", "cpu"), "even"), "the placement asks for the partition"),
        (Placement(("cpu", "cpu"), EVEN.owners), "allowed: the same one, or partition=None"),
        (Placement(("cpu",)), r"cards are \('cpu',\); the bank is split over \('cpu', 'cpu'\)"),
        (Placement(("cpu", "cpu", "cpu")), "the bank is split over"),
    ):
        with pytest.raises(ConfigError, match=message):
            MoELayer(config, split, placement=placement)
    for placement, message in (
        (Placement(("cpu", "cpu"), (0, 1)), r"of \(2, 2\) \(experts, cards\); the layer asks"),
        (Placement(("cpu",) * 3, EVEN.owners), r"of \(8, 2\) .* asks for \(8, 3\)"),
        (Placement(("cpu",) * 9), "num_cards is 9 for 8 experts"),
        (Placement(("cpu",), (0,) * 9), r"of \(9, 1\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            MoELayer(config, bank, placement=placement)
    with pytest.raises(ConfigError, match="both given"):
        MoELayer(config, split, placement=Placement(("cpu", "cpu")), cards=["cpu", "cpu"])
    wrong = dataclasses.replace(config, num_experts=9)
    with pytest.raises(ConfigError, match="the config asks for"):
        MoELayer(wrong, split)


def test_cards_that_do_not_go_together(rng, monkeypatch):
    monkeypatch.setattr(placing, "resolve", torch.device)
    layer = small_layer(rng)
    with pytest.raises(Unsupported, match=r"\('cpu', 'cuda:0'\); allowed: all cpu, or all GPUs"):
        MoELayer(layer.config, layer.bank, cards=["cpu", "cuda:0"])
    names = {"cuda:0": "sm_90", "cuda:1": "sm_120"}
    monkeypatch.setattr(architectures, "architecture_name", lambda device: names[str(device)])
    with pytest.raises(ConfigError, match=r"cuda:0 \(sm_90\), cuda:1 \(sm_120\); allowed: one"):
        MoELayer(layer.config, layer.bank, cards=["cuda:0", "cuda:1"])


def test_a_layer_that_was_moved_is_refused(rng):
    cards = on_cards(small_layer(rng), EVEN)
    cards.cards.devices = (CPU, torch.device("cuda", 1))
    with pytest.raises(Unsupported, match=r"the experts are on \('cpu', 'cpu'\), the layer was"):
        cards(torch.zeros(1, 64).bfloat16())


def test_copies_pickles_and_state_dict(rng):
    layer = small_layer(rng)
    x = torch.randn(4, 64, generator=rng).bfloat16()
    expected = layer(x)
    cards = on_cards(layer, ODD)
    for other in (copy.deepcopy(cards), pickle.loads(pickle.dumps(cards)), cards.to("cpu")):
        assert_same_bits(other(x), expected)
        assert other.placement == cards.placement
    other = on_cards(small_layer(torch.Generator().manual_seed(9)), ODD)
    other.load_state_dict(cards.state_dict())
    assert_same_bits(other(x), expected)
    cards.bank[1].down_codes ^= 0x11
    layer.bank.down_codes[1::2] ^= 0x11
    assert_same_bits(cards(x), layer(x))
    assert not torch.equal(cards(x), expected)


def test_explain(rng):
    layer = small_layer(rng)
    found = on_cards(layer, EVEN, serial=True).explain(8)
    assert found.cards == (
        "2 cards, explicit map; one card after the other (serial); a piece of 8 tokens sends "
        "2176 bytes out and 2048 back as partials",
        "card 0: 4 experts (0-3), on cpu, owner of the tokens, one vector a token for groups 0-3",
        "card 1: 4 experts (4-7), on cpu, peer, one vector a token for groups 4-7",
    )
    assert found.to_dict()["cards"] == list(found.cards)
    assert all(f"\n  {line}" in str(found) for line in found.cards)
    assert layer.explain(8).cards == ()
    assert "all cards at once" in on_cards(layer, ODD).explain(1).cards[0]
