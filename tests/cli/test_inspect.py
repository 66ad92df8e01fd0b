"""`exactmoe inspect`: from headers, checked against the files."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import native_checkpoints
from exactmoe.report import fp8_units


def file_bytes(folder, part):
    """Bytes of all tensors whose name contains `part`, by reading them."""
    total = 0
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, framework="pt") as handle:
            total += sum(handle.get_tensor(n).nbytes for n in handle.keys() if part in n)  # noqa: SIM118
    return total


def test_json(run, demo):
    result = run("inspect", demo, "--json")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    layers = content["layers"]
    assert sum(row["routed_bytes"] for row in layers) == file_bytes(demo, ".experts.")
    kinds = [row["kind"] for row in layers]
    if content["model_type"] == "glm5_next":
        assert kinds == ["dense"] + ["score"] * 5
        assert {row["dialect"] for row in layers[1:]} == {"ModelOpt NVFP4"}
        assert layers[1]["format"] == "nvfp4"
        assert {row["units"] for row in layers} == {"bf16"}
        assert {row["fp8"] for row in layers} == {None}
        assert (layers[1]["experts"], layers[1]["top_k"]) == (20, 4)
        assert layers[0]["experts"] is None
        assert layers[0]["dense_bytes"] == 3 * 256 * 384 * 2
    else:
        assert kinds == ["hash"] + ["score"] * 4
        assert {row["dialect"] for row in layers} == {"DeepSeek MXFP4"}
        assert {row["units"] for row in layers} == {"fp8 24/24"}
        assert layers[0]["router_bytes"] == 24 * 256 * 2 + 2048 * 4 * 8
    report = content["report"]
    parts = ("consumed", "ignored")
    listed = sum(entry["bytes"] for part in parts for entry in report[part].values())
    assert listed == report["total"]["bytes"]
    assert report["errors"]["messages"] == []


def test_text(run, demo):
    result = run("inspect", demo)
    assert result.exit_code == 0
    assert "routed bytes" in result.stdout
    assert "consumed  routed experts" in result.stdout
    assert "0 missing" in result.stdout


def test_headers_only(run):
    folder = Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4"
    rows = json.loads(run("inspect", folder, "--json", "--headers-only").stdout)["layers"]
    assert {row["units"] for row in rows} == {None}
    assert "not read" in run("inspect", folder, "--headers-only").stdout
    as_a16 = json.loads(run("inspect", folder, "--json", "--numerics", "a16").stdout)["layers"]
    assert {row["units"] for row in as_a16} == {"bf16"}


def test_an_expert_that_fp8_units_cannot_hold_is_counted(run, tmp_path):
    """One block scale 20 binades away from its neighbours in one expert's gate."""
    source = Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4"
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if "layers.2." in n and n.endswith("experts.5.w1.scale"))
    raw = tensors[name].view(torch.uint8)
    raw[0, 0] -= 20
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rows = json.loads(run("inspect", folder, "--json").stdout)["layers"]
    assert [row["units"] for row in rows] == ["fp8 24/24"] * 2 + ["fp8 23/24 24/24 24/24"] + [
        "fp8 24/24"
    ] * 2
    gate, up = rows[2]["fp8"]["gate"], rows[2]["fp8"]["up"]
    assert (gate["exact"], gate["experts"], up["exact"]) == (23, 24, 24)
    (wide,) = [int(span) for span in gate["spans"] if int(span) > 14]
    assert 18 <= wide <= 22 and gate["spans"][str(wide)] == 1
    text = run("inspect", folder).stdout
    assert "359 of 360 exact; fp8 units hold 14" in text
    assert f"23/24, spans {min(map(int, gate['spans']))}-{wide}" in text
    assert re.search(rf"^ +{wide} binades +1  #$", text, re.M), text


def test_nvfp4_with_powers_of_two_counts(run, tmp_path):
    """A lossless cast of a native checkpoint; one general scale makes its expert bf16."""
    source = Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4"
    folder = tmp_path / "model"
    assert run("quantize", source, folder, "--format", "nvfp4").exit_code == 0
    native = json.loads(run("inspect", source, "--json").stdout)["layers"]
    rows = json.loads(run("inspect", folder, "--json").stdout)["layers"]
    assert {row["format"] for row in rows} == {"nvfp4"}
    assert [row["units"] for row in rows] == [row["units"] for row in native]
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in tensors if "layers.3." in n and n.endswith("experts.7.w2.weight_scale"))
    tensors[name].view(torch.uint8)[3, 2] |= 3
    tensors[name.removesuffix("_scale")][3] = 0x22
    save_file(tensors, file, metadata={"format": "pt"})
    rows = json.loads(run("inspect", folder, "--json").stdout)["layers"]
    assert rows[3]["units"] == "fp8 24/24 24/24 23/24"
    assert rows[3]["fp8"]["down"]["no_powers_of_two"] == 1
    assert "1 no powers of two" in run("inspect", folder).stdout


def test_experts_are_counted_a_few_at_a_time(run, monkeypatch):
    """With chunks of one expert, of five, and of all: the same counts, in bounded memory."""
    folder = Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4"
    found, counted = [], []
    spans = fp8_units.piece_spans

    def record(weight):
        counted.append(weight.num_experts)
        return spans(weight)

    monkeypatch.setattr(fp8_units, "piece_spans", record)
    for chunk, most in ((1, 1), (5 * 256 * 128 // 2, 5), (2**26, 24)):
        monkeypatch.setattr(fp8_units, "CHUNK_BYTES", chunk)
        counted.clear()
        found.append(json.loads(run("inspect", folder, "--json").stdout)["layers"])
        assert max(counted) == most and sum(counted) == 5 * 3 * 24
    assert found[0] == found[1] == found[2]


def test_a_missing_tensor_is_listed_and_the_status_is_2(run, tmp_path):
    source = Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4"
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if "layers.2." in n and n.endswith("experts.5.w1.scale"))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = run("inspect", folder, "--json")
    assert result.exit_code == 2
    assert any(
        name in message for message in json.loads(result.stdout)["report"]["errors"]["messages"]
    )


def test_fp8_linear_layers_between_the_blocks(run, tmp_path):
    """A native checkpoint's attention; without its scales load_model refuses, and that is said."""
    source = Path(__file__).resolve().parents[2] / "demo" / "deepseek_v4"
    plain = json.loads(run("inspect", source, "--json", "--headers-only").stdout)
    assert plain["linears"] == {"layers": 0, "bytes": 0, "refused": None}
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    names = native_checkpoints.fp8(tensors, native_checkpoints.ATTENTION["deepseek_v4"], "scale")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    parts = [name.removesuffix("weight") + part for name in names for part in ("weight", "scale")]
    nbytes = sum(tensors[part].nbytes for part in parts)
    found = json.loads(run("inspect", folder, "--json", "--headers-only").stdout)["linears"]
    assert found == {"layers": len(names), "bytes": nbytes, "refused": None}
    text = run("inspect", folder, "--headers-only").stdout
    assert f"of these, {len(names)} linear layers in FP8 128x128 ({nbytes} bytes)" in text
    del tensors["layers.1.attn.wq_a.scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = run("inspect", folder, "--headers-only").stdout
    assert "load_model refuses: model.safetensors: layers.1.attn.wq_a.weight (F8_E4M3" in text
