"""ExpertBank: the packed weights of the experts that a card owns."""

from exactmoe.bank.expert_bank import ExpertBank, quantize_experts
from exactmoe.bank.module import ExactModule
from exactmoe.bank.router import Router

__all__ = ["ExactModule", "ExpertBank", "Router", "quantize_experts"]
