"""`exactmoe inspect`: from headers, checked against the files."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


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
