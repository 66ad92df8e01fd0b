"""The wheel holds the whole package and runs without the repository."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

# Imports every module that needs no GPU language, and says where the package was found.
IMPORT_ALL = """
import importlib, pkgutil, exactmoe
LANGUAGES = ("triton", "cuda")
for module in pkgutil.walk_packages(exactmoe.__path__, "exactmoe."):
    skipped = tuple(f"exactmoe.{part}.{name}" for part in ("kernels", "ops") for name in LANGUAGES)
    skipped += ("exactmoe.__main__",)
    if not module.name.startswith(skipped):
        importlib.import_module(module.name)
print(exactmoe.__file__)
"""

# A layer gives three tokens the bytes that each of them has alone.
RUN_LAYER = """
import torch, exactmoe
generator = torch.Generator().manual_seed(1)
def random(*shape):
    return torch.randn(*shape, generator=generator).bfloat16()
bank = exactmoe.quantize_experts(*(random(4, 32, 32) for _ in range(3)), format="nvfp4")
config = exactmoe.MoEConfig(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2)
layer = exactmoe.MoELayer(config, bank, cards=["cpu"])
x, weights = random(3, 32), torch.full((3, 2), 0.5)
expert_ids = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32)
together = layer.experts(x, expert_ids, weights)
alone = [layer.experts(x[t : t + 1], expert_ids[t : t + 1], weights[t : t + 1]) for t in range(3)]
print(together.shape, torch.equal(together.view(torch.int16), torch.cat(alone).view(torch.int16)))
"""


def run(*command, **options):
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run("-m", "pip", "wheel", *flags, "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("exactmoe-*.whl")
    return path


@pytest.mark.slow
def test_wheel_holds_the_package(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "exactmoe").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == source


@pytest.mark.slow
def test_wheel_runs_alone(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    flags = ["--no-deps", "--no-index", "--no-compile", "--quiet"]
    run("-m", "pip", "install", *flags, "--target", site, wheel)
    # The import hook of an editable install lies in site-packages, behind PYTHONPATH.
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    found, equal = run("-c", IMPORT_ALL + RUN_LAYER, cwd=elsewhere, env=environment).splitlines()
    assert Path(found) == site / "exactmoe" / "__init__.py"
    assert equal == "torch.Size([3, 32]) True"
    usage = run(site / "bin" / "exactmoe", "--help", cwd=elsewhere, env=environment)
    assert "generate" in usage and "verify" in usage
