"""Where a checkpoint lies: a folder, or a hub id that is downloaded into the hub's cache."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from exactmoe.errors import CheckpointError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def checkpoint_folder(path: str | Path) -> Path:
    """The folder of a checkpoint.

    A hub id ("owner/name") that is no folder here is downloaded, or found in the hub's cache.

    Raises:
        CheckpointError: no such folder, and no such model on the hub or no way to reach it; or
            `path` is "".
    """
    if path == "":  # Path would take the current folder for it
        raise CheckpointError(
            "path is '', the empty text; allowed: a folder, or a hub id such as owner/name"
        )
    folder = Path(path)
    if folder.is_dir():
        return folder
    if not isinstance(path, str) or not _HUB_ID.fullmatch(path):
        raise CheckpointError(
            f"{path} is not a folder; allowed: a folder, or a hub id such as owner/name"
        )
    try:
        return Path(snapshot_download(path, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        # The hub tells it in several lines.
        told = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} is no folder here and cannot be had from the hub: {told}"
        ) from error
