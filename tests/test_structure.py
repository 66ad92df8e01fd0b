"""The repository keeps its shape, and each check of tools/structure.py finds a planted fault."""

from pathlib import Path

import pytest

import structure

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("check", structure.CHECKS, ids=lambda check: check.__name__)
def test_repository(check):
    assert check(ROOT) == []


def plant(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


UPWARD = [
    ("bank/partition.py", "from exactmoe.layer import MoELayer\n"),
    ("bank/partition.py", "import exactmoe.layer\n"),
    ("bank/partition.py", "from exactmoe import layer\n"),
    ("bank/partition.py", "from .. import layer\n"),
    ("bank/partition.py", "from ..layer import MoELayer\n"),
    ("bank/deep/cut.py", "from ...layer import MoELayer\n"),
    ("bank/partition.py", "def f():\n    from exactmoe.layer import MoELayer\n"),
    ("bank/partition.py", "if TYPE_CHECKING:\n    from exactmoe.layer import MoELayer\n"),
    ("bank/partition.py", "importlib.import_module('exactmoe.layer')\n"),
    ("bank/partition.py", "from exactmoe import MoELayer\n"),
    ("reference/down.py", "from exactmoe.kernels.cpu import down\n"),
    ("config.py", "from exactmoe.formats import PackedWeight\n"),
    ("formats/bf16.py", "from exactmoe.config import Numerics\n"),
    ("errors.py", "from exactmoe.config import MoEConfig\n"),
    ("helpers/things.py", ""),
]


@pytest.mark.parametrize(("name", "text"), UPWARD)
def test_import_direction_finds(tmp_path, name, text):
    plant(tmp_path, "src/exactmoe/config.py", "")
    plant(tmp_path, "src/exactmoe/layer.py", "")
    plant(tmp_path, f"src/exactmoe/{name}", text)
    (finding,) = structure.import_direction(tmp_path)
    assert finding.startswith(f"src/exactmoe/{name}")


def test_import_direction_allows(tmp_path):
    plant(tmp_path, "src/exactmoe/__init__.py", "from exactmoe.layer import MoELayer\n")
    plant(tmp_path, "src/exactmoe/errors.py", "")
    plant(tmp_path, "src/exactmoe/env.py", "from exactmoe.errors import ConfigError\n")
    plant(tmp_path, "src/exactmoe/layer.py", "from .bank import ExpertBank\nimport torch\n")
    plant(tmp_path, "src/exactmoe/bank/__init__.py", "from .partition import Partition\n")
    plant(tmp_path, "src/exactmoe/bank/partition.py", "from exactmoe.bank import layout\n")
    plant(tmp_path, "src/exactmoe/cli/main.py", "from exactmoe import __version__, load_model\n")
    assert structure.import_direction(tmp_path) == []


FOREIGN = [
    ("layer.py", "import triton\n"),
    ("layer.py", "import triton.language as tl\n"),
    ("bank/bank.py", "import torch.distributed as dist\n"),
    ("bank/bank.py", "from torch import distributed\n"),
    ("bank/bank.py", "import torch\nrank = torch.distributed.get_rank()\n"),
    ("checkpoint/index.py", "def f():\n    from transformers import AutoConfig\n"),
    ("__init__.py", "import transformers\n"),
]


@pytest.mark.parametrize(("name", "text"), FOREIGN)
def test_foreign_imports_finds(tmp_path, name, text):
    plant(tmp_path, f"src/exactmoe/{name}", text)
    (finding,) = structure.foreign_imports(tmp_path)
    assert finding.startswith(f"src/exactmoe/{name}")


def test_foreign_imports_allows(tmp_path):
    plant(tmp_path, "src/exactmoe/kernels/triton/down.py", "import triton\n")
    plant(tmp_path, "src/exactmoe/ops/down.py", "import triton\n")
    plant(tmp_path, "src/exactmoe/hf/load_model.py", "import transformers, torch.distributed\n")
    plant(tmp_path, "src/exactmoe/bank/bank.py", "from exactmoe.kernels import triton\n")
    assert structure.foreign_imports(tmp_path) == []


ENVIRONMENT = [
    "import os\nhome = os.environ['HOME']\n",
    "import os\nhome = os.getenv('HOME')\n",
    "from os import environ\n",
    "from os import getenv as get\n",
]


@pytest.mark.parametrize("text", ENVIRONMENT)
def test_environment_use_finds(tmp_path, text):
    plant(tmp_path, "src/exactmoe/env.py", text)
    assert structure.environment_use(tmp_path) == []
    plant(tmp_path, "src/exactmoe/plan/choose.py", text)
    (finding,) = structure.environment_use(tmp_path)
    assert finding.startswith("src/exactmoe/plan/choose.py")


@pytest.mark.parametrize("folder", structure.SIZED)
@pytest.mark.parametrize("name", ["long.py", "deep/long.cu"])
def test_file_size_finds(tmp_path, folder, name):
    plant(tmp_path, f"{folder}/{name}", "x\n" * structure.MAX_LINES)
    assert structure.file_size(tmp_path) == []
    plant(tmp_path, f"{folder}/{name}", "x\n" * (structure.MAX_LINES + 1))
    assert structure.file_size(tmp_path) == [f"{folder}/{name}: 401 lines, 400 are allowed"]


def test_argument_count_finds(tmp_path):
    eight = ", ".join("abcdefgh")
    plant(tmp_path, "src/exactmoe/good.py", f"def f({eight}): ...\n")
    plant(tmp_path, "src/exactmoe/method.py", f"class C:\n  def f(self, {eight}): ...\n")
    plant(tmp_path, "src/exactmoe/device.py", f"@triton.jit\ndef f({eight}, i, j): ...\n")
    plant(tmp_path, "src/exactmoe/cpu.py", f"@njit(cache=True)\ndef f({eight}, i, j): ...\n")
    plant(tmp_path, "src/exactmoe/call.py", f"@intrinsic\ndef f({eight}, i, j): ...\n")
    assert structure.argument_count(tmp_path) == []
    plant(tmp_path, "src/exactmoe/bad.py", f"@cache\ndef f({eight}, *, i): ...\n")
    (finding,) = structure.argument_count(tmp_path)
    assert finding.startswith("src/exactmoe/bad.py:2 f takes 9 arguments")


SWALLOWED = [
    "try:\n  f()\nexcept:\n  raise\n",
    "try:\n  f()\nexcept Exception:\n  pass\n",
    "try:\n  f()\nexcept (ValueError, BaseException):\n  ...\n",
    "for x in y:\n  try:\n    f()\n  except Exception:\n    continue\n",
    "with contextlib.suppress(Exception):\n  f()\n",
]


@pytest.mark.parametrize("text", SWALLOWED)
def test_swallowed_exceptions_finds(tmp_path, text):
    plant(tmp_path, "src/exactmoe/good.py", "try:\n  f()\nexcept KeyError:\n  pass\n")
    assert structure.swallowed_exceptions(tmp_path) == []
    plant(tmp_path, "src/exactmoe/bad.py", text)
    assert len(structure.swallowed_exceptions(tmp_path)) == 1


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_banned_marks_finds(tmp_path, mark):
    plant(tmp_path, "tests/good.py", f"{mark}S = 1\n")
    assert structure.banned_marks(tmp_path) == []
    plant(tmp_path, "tests/bad.py", f"x = 1\n# {mark}: later\n")
    assert structure.banned_marks(tmp_path) == [f"tests/bad.py:2 says {mark}"]


TREE = """
```
src/exactmoe/
L0 errors.py         what went wrong
   bank/             weights
     partition.py    who owns which
L1 config.py         settings
docs/log.md
```
A word in a sentence such as gone.py is no tree.
"""


def test_design_tree_finds(tmp_path):
    assert structure.design_tree(tmp_path) == []
    plant(tmp_path, "docs/design.md", TREE.replace("src/exactmoe/", "here"))
    missing = "docs/design.md has no fence that begins with src/exactmoe/"
    assert structure.design_tree(tmp_path) == [missing]
    plant(tmp_path, "docs/design.md", TREE)
    plant(tmp_path, "docs/log.md", "")
    plant(tmp_path, "src/exactmoe/config.py", "")
    plant(tmp_path, "src/exactmoe/bank/partition.py", "")
    (finding,) = structure.design_tree(tmp_path)
    assert finding == "docs/design.md:4 names errors.py, which does not exist"
    plant(tmp_path, "src/exactmoe/errors.py", "")
    assert structure.design_tree(tmp_path) == []
    (tmp_path / "src/exactmoe/bank/partition.py").rename(tmp_path / "src/exactmoe/partition.py")
    moved = structure.design_tree(tmp_path)
    assert moved == ["docs/design.md:6 names partition.py, which does not exist"]
