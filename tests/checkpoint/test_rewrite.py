"""quantize_checkpoint: values, names, refusals, and runs that are stopped."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_layouts import DEEPSEEK_WORDS, hybrid_config, same_bytes
from checkpoint_maker import (
    Tensors,
    decode_modelopt,
    decode_native,
    deepseek_config,
    deepseek_tensors,
    glm_config,
    glm_tensors,
    write,
)
from exactmoe.checkpoint import Checkpoint, audit, read_layer
from exactmoe.checkpoint.rewrite import (
    REPORT,
    WORK,
    QuantizeRequest,
    Row,
    engine,
    quantize_checkpoint,
)
from exactmoe.errors import CheckpointError, ConfigError, Unsupported
from exactmoe.formats import quantize
from synthetic_checkpoints import DIALECTS, Synthetic, write_synthetic

BASE = "layers.0.ffn.experts.0."
GLM = "model.language_model.layers.1.mlp.experts.0."


def all_tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def exactly_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int64), b.view(torch.int64))


def test_mxfp4_to_nvfp4_and_back(tmp_path: Path) -> None:
    """The values are decoded here from the tensors alone; -0 stays -0."""
    source = write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", "deepseek"))
    rows, notes = quantize_checkpoint(source, tmp_path / "nv", QuantizeRequest("nvfp4"))
    before, after = all_tensors(source), all_tensors(tmp_path / "nv")
    assert notes == () and len(rows) == 24 and all(row.exact for row in rows)
    assert {(row.before, row.after) for row in rows} == {("DeepSeek MXFP4", "ModelOpt NVFP4")}
    for layer in (0, 1):
        for expert in range(4):
            names = {w: f"layers.{layer}.ffn.experts.{expert}.{w}" for w in DEEPSEEK_WORDS.values()}
            for name in names.values():
                assert same_bytes(after[f"{name}.weight"], before[f"{name}.weight"])
                assert exactly_equal(decode_modelopt(after, name), decode_native(before, name))
                assert after[f"{name}.weight_scale_2"].shape == ()
                assert f"{name}.scale" not in after
            gate, up = (after[f"{names[w]}.weight_scale_2"] for w in ("w1", "w3"))
            assert gate == up
            assert np.frexp(gate.numpy())[0] == 0.5
    kept = {name for name in before if ".experts." not in name}
    assert kept == {name for name in after if ".experts." not in name}
    assert all(same_bytes(after[name], before[name]) for name in kept)
    quantize_checkpoint(tmp_path / "nv", tmp_path / "mx", QuantizeRequest("mxfp4"))
    again = all_tensors(tmp_path / "mx")
    for expert in range(4):
        name = f"layers.1.ffn.experts.{expert}.w2"
        assert same_bytes(again[f"{name}.weight_packed"], before[f"{name}.weight"])
        assert same_bytes(again[f"{name}.weight_scale"], before[f"{name}.scale"])


def native_with(rng: torch.Generator, scales: dict[str, list[int]]) -> Tensors:
    """deepseek_tensors() whose experts all have exponent byte 120, those of `scales` others."""
    tensors = deepseek_tensors(rng)
    for name in [
        n for n in tensors if ".experts." in n and n.endswith(".scale") and "shared" not in n
    ]:
        tensors[name] = torch.full((128, 4), 120, dtype=torch.uint8)
        for word, values in scales.items():
            if name == f"{BASE}{word}.scale":
                tensors[name][0, : len(values)] = torch.tensor(values, dtype=torch.uint8)
        tensors[name] = tensors[name].view(torch.float8_e8m0fnu)
    return tensors


@pytest.mark.parametrize(
    ("scales", "exact"),
    [
        ({"w1": [103, 120]}, True),  # 17 binades
        ({"w1": [102, 120]}, False),  # 18
        ({"w3": [138]}, False),  # gate and up share a scale: 120 in w1, 138 in w3
        ({"w2": [137]}, True),
    ],
)
def test_where_a_cast_is_exact(
    tmp_path: Path, rng: torch.Generator, scales: dict[str, list[int]], exact: bool
) -> None:
    tensors = native_with(rng, scales)
    # Every block counts: no code is zero.
    tensors = {n: t | 1 if t.dtype == torch.int8 else t for n, t in tensors.items()}
    tensors = {n: t | 16 if t.dtype == torch.int8 else t for n, t in tensors.items()}
    write(tmp_path / "in", deepseek_config(), tensors)
    if exact:
        rows, _ = quantize_checkpoint(tmp_path / "in", tmp_path / "out", QuantizeRequest("nvfp4"))
        assert all(row.exact for row in rows)
        after = all_tensors(tmp_path / "out")
        for word in DEEPSEEK_WORDS.values():
            name = BASE + word
            assert exactly_equal(decode_modelopt(after, name), decode_native(tensors, name))
        return
    with pytest.raises(
        ConfigError, match=r"layers.0.ffn.experts.0.w1 and .*w3 have no exact nvfp4"
    ):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", QuantizeRequest("nvfp4"))
    rows, _ = quantize_checkpoint(
        tmp_path / "in", tmp_path / "out", QuantizeRequest("nvfp4", lossy=True)
    )
    lossy = [row for row in rows if not row.exact]
    assert [row.name for row in lossy] == [f"{BASE}w1", f"{BASE}w3"]
    require_errors(lossy, tensors, all_tensors(tmp_path / "out"), decode_native)


def require_errors(rows: list[Row], before: Tensors, after: Tensors, decode: Any) -> None:
    """The SQNR of the rows, computed here from the stored tensors."""
    for row in rows:
        old, new = decode(before, row.name), decode_modelopt(after, row.name)
        noise = (old - new).square().sum()
        expected = None if noise == 0 else float(10 * torch.log10(old.square().sum() / noise))
        assert row.sqnr_db == (None if expected is None else pytest.approx(expected, rel=1e-9))


def test_a_block_of_zeros_does_not_count(tmp_path: Path, rng: torch.Generator) -> None:
    tensors = native_with(rng, {"w1": [0, 254]})
    tensors[f"{BASE}w1.weight"][0, :32] = torch.tensor([-128, 8] * 16, dtype=torch.int8)  # +-0
    write(tmp_path / "in", deepseek_config(), tensors)
    rows, _ = quantize_checkpoint(tmp_path / "in", tmp_path / "out", QuantizeRequest("nvfp4"))
    assert all(row.exact for row in rows)
    after = all_tensors(tmp_path / "out")
    assert exactly_equal(decode_modelopt(after, f"{BASE}w1"), decode_native(tensors, f"{BASE}w1"))


@pytest.mark.parametrize("change", ["global", "block", "pair"])
def test_nvfp4_without_an_exact_form(tmp_path: Path, change: str) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic(shards=1))
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    codes = tensors[f"{GLM}gate_proj.weight"]
    codes |= 0x11
    scales = tensors[f"{GLM}gate_proj.weight_scale"].view(torch.uint8)
    if change == "global":
        tensors[f"{GLM}gate_proj.weight_scale_2"].mul_(3)
    elif change == "block":
        scales[5, 2:4] = 0x39  # 1.125
    else:
        scales[5, 2:4] = torch.tensor([0x38, 0x40], dtype=torch.uint8)  # 1, 2
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"experts.0.gate_proj and .*up_proj have no exact mxfp4"):
        quantize_checkpoint(source, tmp_path / "out", QuantizeRequest("mxfp4"))
    assert not (tmp_path / "out" / WORK).exists()


@pytest.mark.parametrize("rule", [None, "four_over_six"])
def test_bf16_to_nvfp4(tmp_path: Path, rule: str | None) -> None:
    """The bytes of the quantiser for gate and up together, and for down; the folder loads."""
    source = write_synthetic(tmp_path / "in", Synthetic("glm5_next", "bf16", 128, 64))
    request = QuantizeRequest("nvfp4", rule, lossy=True)
    rows, _ = quantize_checkpoint(source, tmp_path / "out", request)
    before, after = all_tensors(source), all_tensors(tmp_path / "out")
    for words in (("gate_proj", "up_proj"), ("down_proj",)):
        joined = torch.cat([before[f"{GLM}{w}.weight"] for w in words])
        packed = quantize(joined[None], "nvfp4", rule)
        assert packed.scales is not None and packed.global_scale is not None
        parts = [(f"{GLM}{w}", before[f"{GLM}{w}.weight"].shape[0]) for w in words]
        codes = packed.codes[0].split([n for _, n in parts])
        scales = packed.scales[0].split([n for _, n in parts])
        for (name, _), code, scale in zip(parts, codes, scales, strict=True):
            assert same_bytes(after[f"{name}.weight"], code)
            assert same_bytes(after[f"{name}.weight_scale"], scale)
            assert same_bytes(after[f"{name}.weight_scale_2"], packed.global_scale[0])
    require_errors(rows, before, after, lambda t, name: t[f"{name}.weight"].double())
    assert all(15 < (row.sqnr_db or 0) < 30 for row in rows)
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert [Row(**row) for row in report] == rows
    checkpoint = Checkpoint(tmp_path / "out")
    audit(checkpoint).require_clean()
    read_layer(checkpoint, 1)


@pytest.mark.parametrize(("what", "count"), [("routed", 12), ("routed+shared", 15), ("all", 18)])
def test_what(tmp_path: Path, what: str, count: int) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic("glm5_next", "bf16"))
    request = QuantizeRequest("nvfp4", what=what, lossy=True)
    rows, _ = quantize_checkpoint(source, tmp_path / "out", request)
    assert len(rows) == count
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "ignore"
    ]
    dense, block = "model.language_model.layers.0.mlp", "model.language_model.layers.1.mlp"
    left = {f"{block}.gate"}
    left |= {f"{block}.shared_experts.{w}_proj" for w in ("gate", "up", "down") if what == "routed"}
    left |= {f"{dense}.{w}_proj" for w in ("gate", "up", "down") if what != "all"}
    assert set(ignore) == left
    checkpoint = Checkpoint(tmp_path / "out")
    audit(checkpoint).require_clean()
    for layer in (0, 1):
        read_layer(checkpoint, layer)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_every_dialect(tmp_path: Path, dialect: str, format: str) -> None:
    """Gate, up and down of every expert are written for themselves, and load."""
    source = write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", dialect, shards=3))
    request = QuantizeRequest(format, lossy=True)
    target = {"nvfp4": "ModelOpt NVFP4", "mxfp4": "compressed-tensors MXFP4"}[format]
    if (dialect, format) == ("compressed-tensors", "nvfp4"):
        with pytest.raises(Unsupported, match="exactmoe convert --dialect modelopt comes first"):
            quantize_checkpoint(source, tmp_path / "out", request)
        return
    if DIALECTS[dialect].name == target:
        with pytest.raises(ConfigError, match=f"its routed weights as {target} already"):
            quantize_checkpoint(source, tmp_path / "out", request)
        return
    rows, _ = quantize_checkpoint(source, tmp_path / "out", request)
    assert len(rows) == 24
    assert all(row.exact == (DIALECTS[dialect].format in ("nvfp4", "mxfp4")) for row in rows)
    checkpoint = Checkpoint(tmp_path / "out")
    assert audit(checkpoint).formats[1]["routed experts"] == target
    old, new = read_layer(Checkpoint(source), 1), read_layer(checkpoint, 1)
    if all(row.exact for row in rows):
        from exactmoe.formats import dequantize

        for name in ("gate", "up", "down"):
            before, after = (dequantize(getattr(w.bank, name)) for w in (old, new))  # type: ignore[union-attr]
            assert exactly_equal(before, after)


def test_fp8_that_is_left_becomes_bf16(tmp_path: Path) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic("glm5_next", "fp8", shards=1))
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.language_model.layers.0.self_attn.o_proj"
    tensors[f"{name}.weight"] = torch.full((130, 256), 0x39, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    tensors[f"{name}.weight_scale_inv"] = torch.tensor([[1.0, 2.0], [0.5, 0.3]])
    save_file(tensors, file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    request = QuantizeRequest("nvfp4", lossy=True)
    _, notes = quantize_checkpoint(source, tmp_path / "out", request)
    assert len(notes) == 1 and notes[0].startswith("1 FP8 weights became BF16")
    after = all_tensors(tmp_path / "out")
    assert f"{name}.weight_scale_inv" not in after
    weight = after[f"{name}.weight"]
    assert weight.dtype == torch.bfloat16
    assert [float(weight[r, c]) for r, c in ((0, 0), (0, 128), (129, 0))] == [1.125, 2.25, 0.5625]
    assert float(weight[129, 255]) == float(torch.tensor(1.125 * 0.3).bfloat16())


def test_published_deepseek_config(tmp_path: Path, rng: torch.Generator) -> None:
    """NVIDIA's words in one direction, DeepSeek's own in the other."""
    config = hybrid_config()
    del config["quantization_config"]["moe_quant_algo"]
    source = write(tmp_path / "in", config, native_with(rng, {}), shards=2)
    quantize_checkpoint(source, tmp_path / "nv", QuantizeRequest("nvfp4"))
    assert json.loads((tmp_path / "nv" / "config.json").read_text()) == hybrid_config()
    quantize_checkpoint(tmp_path / "nv", tmp_path / "mx", QuantizeRequest("mxfp4"))
    assert json.loads((tmp_path / "mx" / "config.json").read_text()) == config
    with pytest.raises(Unsupported, match="what is 'all'; allowed for .*: routed"):
        quantize_checkpoint(source, tmp_path / "all", QuantizeRequest("nvfp4", what="all"))


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """The run ends with `error` when so many projections are written."""
    done, write_one = [0], engine._write

    def failing(*arguments: Any) -> None:
        done[0] += 1
        if done[0] > count:
            raise error
        write_one(*arguments)

    monkeypatch.setattr(engine, "_write", failing)


@pytest.mark.parametrize("count", [0, 3, 14, 23])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full")], ids=["^C", "disk"])
def test_a_stopped_run_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException
) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", "bf16", shards=3))
    (source / "tokenizer.json").write_text("{}")
    request = QuantizeRequest("nvfp4", lossy=True)
    quantize_checkpoint(source, tmp_path / "whole", request)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, count, error)
        with pytest.raises(type(error)):
            quantize_checkpoint(source, out, request, workers=1)
    with pytest.raises(CheckpointError, match="config.json is missing"):
        Checkpoint(out)
    assert not list(out.glob("*.partial")) and not list(out.glob(".*.safetensors*"))
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("*.safetensors")}
    assert len(before) == {0: 0, 3: 0, 14: 1, 23: 2}[count]
    quantize_checkpoint(source, out, request, workers=3)
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole")
    assert before == {n: (out / n).stat().st_mtime_ns for n in before}
    assert not (out / WORK).exists()


def test_another_request_or_another_input_does_not_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", "bf16", shards=3))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 14, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, out, QuantizeRequest("nvfp4", lossy=True), workers=1)
    other = QuantizeRequest("nvfp4", "four_over_six", lossy=True)
    with pytest.raises(ConfigError, match="begun by another request"):
        quantize_checkpoint(source, out, other)
    os.utime(next(source.glob("*.safetensors")), (1, 1))
    with pytest.raises(ConfigError, match="the input has changed since"):
        quantize_checkpoint(source, out, QuantizeRequest("nvfp4", lossy=True))


def test_folders_that_are_refused(tmp_path: Path) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic("deepseek_v4", "deepseek"))
    request = QuantizeRequest("nvfp4")
    for out in (source, source / "deeper"):
        with pytest.raises(ConfigError, match="allowed: another folder"):
            quantize_checkpoint(source, out, request)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="full is not empty"):
        quantize_checkpoint(source, tmp_path / "full", request)
    with pytest.raises(ConfigError, match="a file; allowed: a folder"):
        quantize_checkpoint(source, tmp_path / "full" / "notes.txt", request)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "int4"}, "int4"),
        ({"format": "nvfp4", "rule": "ocp"}, "rule is 'ocp'; allowed: modelopt, four_over_six"),
        ({"format": "nvfp4", "what": "dense"}, "what is 'dense'; allowed: routed, routed.shared"),
    ],
)
def test_requests_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizeRequest(**arguments)


def test_bf16_must_be_asked_for(tmp_path: Path) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic("glm5_next", "bf16"))
    with pytest.raises(ConfigError, match="is BF16, and nvfp4 cannot hold all of its values"):
        quantize_checkpoint(source, tmp_path / "out", QuantizeRequest("nvfp4"))
    assert not (tmp_path / "out").exists()


def test_a_value_that_is_not_finite_is_named(tmp_path: Path, rng: torch.Generator) -> None:
    source = write_synthetic(tmp_path / "in", Synthetic("glm5_next", "bf16", shards=1))
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors[f"{GLM}down_proj.weight"][3, 7] = torch.inf
    save_file(tensors, file)
    with pytest.raises(
        CheckpointError, match=r"experts.0.down_proj.weight.*inf at row 3, column 7"
    ):
        quantize_checkpoint(source, tmp_path / "out", QuantizeRequest("nvfp4", lossy=True))


def test_columns_that_do_not_fit(tmp_path: Path, rng: torch.Generator) -> None:
    write(tmp_path / "in", glm_config(), glm_tensors(rng))
    request = QuantizeRequest("mxfp4", what="all", lossy=True)
    with pytest.raises(Unsupported, match=r"layers.0.mlp.down_proj: k is 48 in a mxfp4 weight"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", request)
