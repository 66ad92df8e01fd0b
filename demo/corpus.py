"""Text of the demo: Python's standard library, split into training files and held-out modules.

`python demo/corpus.py --out DIR` writes `tokenizer/`, `train.npy` and `heldout.npy` (uint16 token
ids) into DIR. The text is read from the standard library of the running interpreter; demo/README.md
states the version that the shipped checkpoints saw. The held-out modules lie in demo/heldout/ with
their licence.
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|image|>",
    "<|video|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|video_start|>",
    "<|video_end|>",
)
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
HELDOUT_FOLDER = Path(__file__).parent / "heldout"
HELDOUT_MODULES = (
    "bisect",
    "cmd",
    "colorsys",
    "contextlib",
    "fnmatch",
    "fractions",
    "glob",
    "graphlib",
    "heapq",
    "netrc",
    "numbers",
    "queue",
    "sched",
    "shelve",
    "string",
    "textwrap",
)
# Tables of data and texts that are not programs.
SKIPPED_PARTS = ("site-packages", "__pycache__", "encodings", "pydoc_data", "data", "cjkencodings")
MAX_FILE_BYTES = 250_000
MAX_MEAN_LINE = 60
# The user's message becomes a comment; the model goes on with code.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content }}\n"
    "{% else %}# {{ message.content }}\n{% endif %}"
    "{% endfor %}"
)


def standard_library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(path: Path) -> bool:
    """True for the held-out modules and for the tests of them."""
    stem = path.stem.removeprefix("test_")
    return stem in HELDOUT_MODULES


def training_files(root: Path) -> list[Path]:
    """Python sources under `root` that parse, are programs rather than tables, and are not held
    out; sorted.
    """
    kept, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        if any(part in SKIPPED_PARTS for part in path.relative_to(root).parts) or is_held_out(path):
            continue
        text = read_source(path)
        if text is None or text in seen:
            continue
        seen.add(text)
        kept.append(path)
    return kept


def read_source(path: Path) -> str | None:
    """Text of a source file, or None when it is empty, too large, a table, or no valid UTF-8
    Python.
    """
    raw = path.read_bytes()
    if not raw.strip() or len(raw) > MAX_FILE_BYTES:
        return None
    try:
        text = raw.decode("utf-8")
        ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return None  # the library's own tests hold broken sources on purpose
    return text if len(text) / (text.count("\n") + 1) <= MAX_MEAN_LINE else None


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCAB_SIZE` entries; encoding a prompt puts bos in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """All texts in one uint16 row; every document is bos, its tokens, eos, so that the model learns
    to stop.
    """
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    joined = [token for row in rows for token in (BOS_ID, *row, EOS_ID)]
    return np.asarray(joined, dtype=np.uint16)


def heldout_texts() -> dict[str, str]:
    """File name -> text of the held-out modules kept in the repository."""
    return {path.name: path.read_text("utf-8") for path in sorted(HELDOUT_FOLDER.glob("*.py.txt"))}


def copy_heldout(root: Path) -> None:
    """Copy the held-out modules and the PSF licence; `.py.txt` keeps linters and importers away
    from them.
    """
    HELDOUT_FOLDER.mkdir(exist_ok=True)
    for module in HELDOUT_MODULES:
        (HELDOUT_FOLDER / f"{module}.py.txt").write_bytes((root / f"{module}.py").read_bytes())
    (HELDOUT_FOLDER / "LICENSE.txt").write_bytes((root / "LICENSE.txt").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--copy-heldout", action="store_true", help="refresh demo/heldout/ first")
    arguments = parser.parse_args()
    root = standard_library()
    if arguments.copy_heldout:
        copy_heldout(root)
    files = training_files(root)
    texts = [path.read_text("utf-8") for path in files]
    # The tokenizer learns from the library itself; its tests repeat the same few idioms.
    tokenizer = train_tokenizer(
        [text for path, text in zip(files, texts, strict=True) if "test" not in str(path)]
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(arguments.out / "tokenizer")
    train = encode_documents(tokenizer, texts)
    heldout = encode_documents(tokenizer, list(heldout_texts().values()))
    np.save(arguments.out / "train.npy", train)
    np.save(arguments.out / "heldout.npy", heldout)
    print(
        f"{len(files)} files, {sum(map(len, texts))} characters, {len(train)} training tokens, "
        f"{len(heldout)} held-out tokens"
    )


if __name__ == "__main__":
    main()
