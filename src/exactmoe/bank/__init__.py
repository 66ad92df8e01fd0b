"""ExpertBank: the packed weights of the experts that a card owns."""

from exactmoe.bank.expert_bank import ExpertBank, quantize_experts
from exactmoe.bank.module import ExactModule
from exactmoe.bank.partition import Partition
from exactmoe.bank.placing import busiest, by_load, fit
from exactmoe.bank.relocate import split_all
from exactmoe.bank.router import Router
from exactmoe.bank.split import SplitBank

__all__ = [
    "ExactModule",
    "ExpertBank",
    "Partition",
    "Router",
    "SplitBank",
    "busiest",
    "by_load",
    "fit",
    "quantize_experts",
    "split_all",
]
