"""Known answers: both backends give the stored bytes, and any change is found and named."""

import hashlib
import importlib
import json
from dataclasses import replace

import pytest
import torch

from exactmoe.errors import BitMismatch, CheckpointError, Unsupported
from exactmoe.proof import known_answers as package
from exactmoe.proof.known_answers import (
    CASES,
    Answer,
    answer_of,
    check,
    file_of,
    known_answers,
    read_file,
    read_files,
    write_file,
)
from exactmoe.proof.known_answers.__main__ import main
from exactmoe.proof.known_answers.file import FILE
from exactmoe.proof.numbers import words
from exactmoe.reference import dot, dot_blocks, dot_dense


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_backend_gives_the_stored_bytes(backend):
    report = known_answers(backend)
    report.raise_on_mismatch()
    assert report.comparisons == 8 * (len(CASES) - 2) + 2  # the two cases on ties have one row


def test_file():
    """The file's own bytes: an answer changes only together with this line."""
    content = json.loads(FILE.read_text())
    assert content["contract"] == 1
    assert list(content["architectures"]) == ["cpu"]
    assert list(content["architectures"]["cpu"]) == [case.name for case in CASES]
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    assert digest == "08ec58bde5632fe81a172a43c49e1341356d8eff0331694aeff4a4de4b0792e8"


def test_files_of_gpus():
    """Stored for the same cases and the same inputs as the CPU's."""
    stored = read_files()
    for name, answers in stored.items():
        assert file_of(name).is_file()
        assert set(answers) <= {case.name for case in CASES}
        for case, answer in answers.items():
            expected = stored["cpu"][case]
            assert answer.inputs == expected.inputs, (name, case)
            assert (answer.y.shape, answer.y.dtype) == (expected.y.shape, expected.y.dtype)
            scale = expected.y[:4].double().norm()
            assert float((answer.y[:4].double() - expected.y[:4].double()).norm() / scale) < 0.1


def test_nothing_stored_for_an_architecture_is_said(monkeypatch):
    monkeypatch.setattr(check, "architecture_name", lambda device: "sm_75")
    monkeypatch.setattr(check, "fingerprint", lambda device: {})
    report = known_answers("auto", device=torch.device("cuda"))
    assert report.not_run == {"known answers": "none are stored for sm_75"}
    assert not report.ok and not report.failed


def test_a_case_without_a_path_is_said(monkeypatch):
    """On a GPU; with a stored answer, and on the CPU, it is an error."""

    def refuse(case, backend, device):
        raise Unsupported("no path")

    stored = read_files()
    few = {"dense nvfp4": stored["cpu"]["dense nvfp4"]}
    monkeypatch.setattr(check, "architecture_name", lambda device: "sm_80")
    monkeypatch.setattr(check, "fingerprint", lambda device: {})
    monkeypatch.setattr(check, "answers_on", refuse)
    monkeypatch.setattr(check, "CASES", [c for c in CASES if c.name != "dense nvfp4"])
    report = known_answers("auto", {"sm_80": few}, device=torch.device("cuda"))
    assert set(report.not_run.values()) == {"no path"}
    assert len(report.not_run) == len(CASES) - 1
    monkeypatch.setattr(check, "CASES", CASES)
    with pytest.raises(Unsupported):
        known_answers("auto", {"sm_80": few}, device=torch.device("cuda"))
    with pytest.raises(Unsupported):
        known_answers("cpu")


def test_rows_are_ordinary_zero_large_subnormal_and_nan():
    for name, answer in read_file()["cpu"].items():
        y = answer.y.float()
        assert torch.isfinite(y[:-1]).all() and y[0].abs().max() > 0.01, name
        if "ties" in name:
            continue
        assert bool((y[4].view(torch.int32) == 0).all()), name  # +0, not -0
        assert bool(y[-1].isnan().all()), name
        if name != "a8 mxfp4 experts only":
            smallest = y[-2].abs()
            assert bool(((smallest > 0) & (smallest < 2.0**-126)).any()), name


def stored_with(name, change):
    stored = read_file()
    stored["cpu"][name] = change(stored["cpu"][name])
    return stored


def test_one_changed_bit_is_named():
    def change(answer):
        y = answer.y.clone()
        y.view(torch.int16)[3, 17] ^= 1
        return replace(answer, y=y)

    report = known_answers("cpu", stored_with("dense nvfp4", change))
    (first,) = report.differences
    assert not report.ok
    assert (first.case, first.token, first.element) == ("dense nvfp4", 3, 17)
    assert int(first.expected_bits, 16) ^ int(first.found_bits, 16) == 1


def test_another_input_is_named_before_any_comparison():
    stored = stored_with("dense nvfp4", lambda answer: replace(answer, inputs="0" * 64))
    with pytest.raises(BitMismatch, match="inputs of 'dense nvfp4' have SHA-256"):
        known_answers("cpu", stored)


def test_a_case_without_an_answer_is_no_pass():
    stored = read_file()
    del stored["cpu"]["a8 nvfp4 sigmoid"]
    with pytest.raises(BitMismatch, match="no case 'a8 nvfp4 sigmoid'"):
        known_answers("cpu", stored)


def bits(y):
    return y.view(torch.uint8)


def cut_off(values):
    return (values.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def one_chain(w, x):
    return dot(w, x)


def one_segment(w, x, scales, segment):
    return dot_blocks(w, x, scales, w.shape[1])


def scaled_operands(w, x, scales, segment):
    spread = scales.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)
    return dot_dense(w * spread[:, : w.shape[1]], x)


def in_slot_order(slots, expert_ids, weights, num_experts, activation):
    present = (expert_ids >= 0).float()[..., None]
    factor = weights[..., None] if activation == "a16" else 1.0
    total = torch.zeros_like(slots[:, 0])
    for k in range(slots.shape[1]):
        total = total + (slots * factor * present)[:, k]
    return total


WRONG_ARITHMETIC = {
    "silu of torch": ("functions", "silu32", torch.nn.functional.silu),
    "exp of torch": ("functions", "exp32", torch.exp),
    "fma with two roundings": ("functions", "fma32", lambda a, b, c: a * b + c),
    "bf16 cut off": ("functions", "to_bf16", cut_off),
    "sigmoid of torch": ("functions", "sigmoid_score", torch.sigmoid),
    "softplus of torch": (
        "functions",
        "sqrt_softplus_score",
        lambda logit: torch.nn.functional.softplus(logit).sqrt(),
    ),
    "dot of torch": ("dot", "dot", lambda w, x: x @ w.T),
    "dense dot in one chain": ("dot", "dot_dense", one_chain),
    "router dot in one chain": ("dot", "dot_router", one_chain),
    "fp8 dot without segments": ("dot", "dot_blocks", one_segment),
    "fp8 scale inside the chain": ("dot", "dot_blocks", scaled_operands),
    "combine in slot order": ("combine", "combine", in_slot_order),
}
USERS = ("functions", "dot", "experts", "dense_mlp", "combine", "router", "quantize")


def plant(monkeypatch, home, name, wrong):
    """Every module of the reference uses `wrong` in place of the function."""
    modules = {user: importlib.import_module(f"exactmoe.reference.{user}") for user in USERS}
    right = getattr(modules[home], name)
    for module in (*modules.values(), importlib.import_module("exactmoe.reference")):
        if getattr(module, name, None) is right:
            monkeypatch.setattr(module, name, wrong)


@pytest.mark.parametrize("fault", WRONG_ARITHMETIC)
def test_wrong_arithmetic_is_found(monkeypatch, fault):
    plant(monkeypatch, *WRONG_ARITHMETIC[fault])
    try:
        assert not known_answers("reference").ok
    except BitMismatch as error:
        assert "silu on the ties" in str(error)  # its inputs are made with the reference's silu


def test_segments_are_seen_in_every_format(monkeypatch):
    plant(monkeypatch, "dot", "dot_dense", one_chain)
    plant(monkeypatch, "dot", "dot_blocks", one_segment)
    stored = read_file()["cpu"]
    found = {
        case.name
        for case in CASES
        if not torch.equal(bits(answer_of(case, "reference").y), bits(stored[case.name].y))
    }
    assert found == {
        f"dense {format}, two segments" for format in ("bf16", "nvfp4", "mxfp4", "fp8")
    }


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_flush_to_zero_around_a_call_changes_nothing(backend):
    """Contract section 1: FTZ and DAZ are cleared, and put back."""
    torch.set_flush_denormal(True)
    try:
        known_answers(backend).raise_on_mismatch()
        assert torch.tensor(2.0**-130) * 1.0 == 0.0
    finally:
        torch.set_flush_denormal(False)


def test_file_round_trip(tmp_path):
    path = tmp_path / "answers.json"
    write_file(read_file(), path)
    assert path.read_bytes() == FILE.read_bytes()


BROKEN = [
    ("", "cannot be read"),
    ("{}", "cannot be read: KeyError"),
    ('{"contract": 2, "architectures": {}}', "contract version is 2; allowed: 1"),
    (
        '{"contract": 1, "architectures": {"cpu": {"a": {"inputs": "", "type": "bf16", '
        '"rows": ["?"]}}}}',
        "cannot be read",
    ),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_broken_file(tmp_path, text, message):
    path = tmp_path / "answers.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_file(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_file(tmp_path / "none.json")


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """The command works on a copy; writing is the reference's work, so the cases are few."""
    from exactmoe.proof.known_answers import __main__, check, file

    path = tmp_path / "answers.json"
    few = tuple(case for case in CASES if case.name in ("dense nvfp4", "a16 mxfp4 hash"))
    write_file({"cpu": {case.name: read_file()["cpu"][case.name] for case in few}}, path)
    monkeypatch.setattr(__main__, "FILE", path)
    for module in (__main__, check):
        monkeypatch.setattr(module, "CASES", few)
    monkeypatch.setattr(check, "read_files", lambda: read_file(path))
    assert file.FILE == FILE
    return path


def test_command_compares(own_file, capsys):
    assert main([]) == 0
    assert "equal" in capsys.readouterr().out


def test_command_adds_a_case_and_refuses_a_change(own_file, capsys):
    before = own_file.read_bytes()
    assert main(["--write"]) == 0
    assert own_file.read_bytes() == before

    answers = read_file(own_file)
    removed = answers["cpu"].pop("dense nvfp4")
    write_file(answers, own_file)
    assert main(["--write"]) == 0
    assert own_file.read_bytes() == before

    wrong = removed.y.clone()
    wrong.view(torch.int16)[0, 0] ^= 1
    answers["cpu"]["dense nvfp4"] = Answer(removed.inputs, wrong)
    write_file(answers, own_file)
    changed = own_file.read_bytes()
    assert main(["--write"]) == 1
    assert own_file.read_bytes() == changed
    assert "['dense nvfp4'] would change" in capsys.readouterr().err
    assert main(["--write", "--new-contract"]) == 0
    assert own_file.read_bytes() == before


def test_numbers_are_the_ones_that_were_chosen():
    """The mixer again, in plain integers."""

    def lowbias32(value):
        value ^= value >> 16
        value = value * 0x7FEB352D % 2**32
        value ^= value >> 15
        value = value * 0x846CA68B % 2**32
        return value ^ value >> 16

    for stream in (0, 1, 16_000_000):
        offset = lowbias32(stream * 0x9E3779B9 % 2**32)
        expected = [lowbias32((offset + i) % 2**32) for i in range(100)]
        assert words((100,), stream).tolist() == expected


def test_package_names_its_command():
    assert "python -m exactmoe.proof.known_answers" in package.__doc__
