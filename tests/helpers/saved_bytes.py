"""Tensors of a folder's safetensors files, compared by name, dtype, shape and bytes."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors_in(folder):
    """Name -> tensor, of all files."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_tensors(found, expected):
    """Two dicts of tensors are equal; the message names what is not."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        kinds = [(t.dtype, tuple(t.shape)) for t in (found[name], tensor)]
        assert kinds[0] == kinds[1], name
        raw, other = (t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert raw.equal(other), name


def assert_saves_as(model, source, folder):
    """`save_pretrained` into `folder` gives the tensors of the folder `source`."""
    model.save_pretrained(folder)
    assert_same_tensors(tensors_in(folder), tensors_in(source))


def assert_written_as(model, source, folder):
    """`save_model` into `folder` gives the files of the folder `source`, byte by byte."""
    from exactmoe.hf import save_model

    save_model(model, folder, progress=False)
    found, expected = (
        {path.name: path.read_bytes() for path in where.iterdir()} for where in (folder, source)
    )
    assert sorted(found) == sorted(expected)
    assert [name for name, content in expected.items() if found[name] != content] == []
