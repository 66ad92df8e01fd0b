"""Peers by name, one file each."""

from functools import partial

from exactmoe.bench.peers import cublas
from exactmoe.bench.peers.grouped_mm import GroupedMM
from exactmoe.bench.peers.humming import Form, Humming
from exactmoe.bench.peers.peer import DensePeer, Peer
from exactmoe.errors import ConfigError

OWN = "own"
PEERS = {
    peer.name: peer
    for peer in (
        Peer("grouped_mm", "torch grouped_mm, bfloat16 copies", OWN, GroupedMM),
        Peer("humming-nvfp4", "humming W4A16 NVFP4", "nvfp4", partial(Humming, Form())),
        Peer("humming-mxfp4", "humming W4A16 MXFP4", "mxfp4", partial(Humming, Form())),
        Peer(
            "humming-nvfp4-invariant",
            "humming W4A16 NVFP4, batch-invariant",
            "nvfp4",
            partial(Humming, Form(batch_invariant=True)),
        ),
        Peer(
            "humming-nvfp4-grouped",
            "humming W4A16 NVFP4, grouped (rows sorted in memory, timed)",
            "nvfp4",
            partial(Humming, Form(gemm_type="grouped_contiguous")),
        ),
        Peer(
            "humming-mxfp4-a8",
            "humming W4A8 MXFP4 (fp8 activations, group 128)",
            "mxfp4",
            partial(Humming, Form(fp8=True)),
        ),
    )
}
DENSE_PEERS = {peer.name: peer for peer in (DensePeer("cublas", "torch linear", cublas.build),)}


def chosen(names: tuple[str, ...]) -> tuple[list[Peer], list[DensePeer]]:
    """Peers by name; "all" and "none" are sets.

    Raises:
        ConfigError: no peer has a name.
    """
    known = {**PEERS, **DENSE_PEERS}
    if names == ("all",):
        names = tuple(known)
    if names == ("none",):
        names = ()
    for name in names:
        if name not in known:
            raise ConfigError(f"peer is {name!r}; allowed: all, none, {', '.join(known)}")
    return (
        [PEERS[name] for name in names if name in PEERS],
        [DENSE_PEERS[name] for name in names if name in DENSE_PEERS],
    )


__all__ = ["DENSE_PEERS", "OWN", "PEERS", "DensePeer", "Peer", "chosen"]
