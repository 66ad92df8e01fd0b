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
for module in pkgutil.walk_packages(exactmoe.__path__, "exactmoe."):
    if not module.name.startswith(("exactmoe.kernels.triton", "exactmoe.kernels.cuda")):
        importlib.import_module(module.name)
print(exactmoe.__file__)
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
    found = run("-c", IMPORT_ALL, cwd=elsewhere, env=environment)
    assert Path(found) == site / "exactmoe" / "__init__.py"
    usage = run(site / "bin" / "exactmoe", "--help", cwd=elsewhere, env=environment)
    assert "generate" in usage and "verify" in usage
