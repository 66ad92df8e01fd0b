"""The stored answers: read, checked, and written; one file an architecture.

proof/known_answers.json holds those of the CPU, proof/known_answers_sm_90.json those of sm_90, ...
"""

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactmoe.config import CONTRACT_VERSION
from exactmoe.dense import DenseMLP
from exactmoe.errors import CheckpointError
from exactmoe.proof.backends import canonical_twin, paths_of
from exactmoe.proof.batch import Batch, Entry
from exactmoe.proof.known_answers.cases import Case

CPU = torch.device("cpu")
FOLDER = Path(__file__).parent.parent
FILE = FOLDER / "known_answers.json"
_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, eq=False)
class Answer:
    """The stored result of one case.

    Attributes:
        inputs: SHA-256 over the bytes of the inputs and weights, in hexadecimal: tells numbers that
            came out otherwise from arithmetic that did.
        y: bfloat16 or float32 [T, H].
    """

    inputs: str
    y: Tensor

    def to_dict(self) -> dict[str, Any]:
        """For JSON: y as base64, one line a row."""
        dtype = "bf16" if self.y.dtype == torch.bfloat16 else "f32"
        rows = [base64.b64encode(_as_bytes(row)).decode("ascii") for row in self.y]
        return {"inputs": self.inputs, "type": dtype, "rows": rows}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Answer":
        """The answer that `to_dict` wrote."""
        rows = [bytearray(base64.b64decode(row, validate=True)) for row in values["rows"]]
        dtype = _DTYPES[values["type"]]
        return cls(
            values["inputs"], torch.stack([torch.frombuffer(row, dtype=dtype) for row in rows])
        )


def build(case: Case, backend: str, device: torch.device = CPU) -> tuple[Entry, Batch]:
    """The entry and the batch of a case. Its numbers follow from its name, not from its place, and
    are made on the CPU.
    """
    stream = int(hashlib.sha256(case.name.encode()).hexdigest()[:6], 16)
    if device == CPU:
        return case.make(stream, backend)
    entry, batch = case.make(stream, "auto")
    layer = canonical_twin(entry.layer.to(device), backend)
    return Entry(entry.name, layer), batch.map(lambda tensor: tensor.to(device))


def answer_of(case: Case, backend: str, device: torch.device = CPU) -> Answer:
    """Run a case; the answer lies on the CPU."""
    entry, batch = build(case, backend, device)
    return Answer(inputs_digest(entry, batch), entry(batch).cpu())


def answers_on(case: Case, backend: str, device: torch.device) -> dict[str, Answer]:
    """Run a case on a device: backend -> its answer, for the named backend and, on a GPU, for each
    further path that the layer has there.
    """
    entry, batch = build(case, backend, device)
    used, *others = paths_of(entry.layer)
    answers = {used: Answer(inputs_digest(entry, batch), entry(batch).cpu())}
    if device != CPU:
        answers |= {name: answer_of(case, name, device) for name in others}
    return answers


def inputs_digest(entry: Entry, batch: Batch) -> str:
    """SHA-256 over names and bytes of the batch and of every buffer of the layer."""
    digest = hashlib.sha256()
    buffers = dict(_buffers(entry))
    for name, tensor in sorted({**batch.tensors(), **buffers}.items()):
        digest.update(name.encode())
        digest.update(_as_bytes(tensor))
    return digest.hexdigest()


def _buffers(entry: Entry) -> list[tuple[str, Tensor]]:
    layer = entry.layer
    named = (
        {"bank": layer.bank}
        if isinstance(layer, DenseMLP)
        else {"bank": layer.bank, "router": layer.router, "shared": layer.shared}
    )
    return [
        (f"{part}.{name}", tensor)
        for part, module in named.items()
        if module is not None
        for name, tensor in module.state_dict().items()
    ]


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def file_of(architecture: str) -> Path:
    """Where the answers of an architecture lie."""
    return FILE if architecture == "cpu" else FOLDER / f"known_answers_{architecture}.json"


def read_files() -> dict[str, dict[str, Answer]]:
    """Architecture -> case -> answer, of every file. CheckpointError: see `read_file`."""
    answers = read_file()
    for path in sorted(FOLDER.glob("known_answers_*.json")):
        answers |= read_file(path)
    return answers


def read_file(path: Path = FILE) -> dict[str, dict[str, Answer]]:
    """Architecture -> case -> answer.

    Raises:
        CheckpointError: the file is missing, malformed, or of another contract version.
    """
    try:
        content = json.loads(path.read_text(encoding="ascii"))
        contract = content["contract"]
        answers = {
            name: {case: Answer.from_dict(values) for case, values in cases.items()}
            for name, cases in content["architectures"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise CheckpointError(f"{path}: known answers cannot be read: {error!r}") from error
    if contract != CONTRACT_VERSION:
        raise CheckpointError(
            f"{path}: contract version is {contract}; allowed: {CONTRACT_VERSION}"
        )
    return answers


def write_file(answers: dict[str, dict[str, Answer]], path: Path = FILE) -> None:
    """Write what `read_file` reads."""
    content = {
        "contract": CONTRACT_VERSION,
        "architectures": {
            name: {case: answer.to_dict() for case, answer in cases.items()}
            for name, cases in answers.items()
        },
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
