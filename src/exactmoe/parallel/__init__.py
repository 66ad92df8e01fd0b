"""Several cards: who runs what, what is sent, and what comes back."""

from exactmoe.parallel.cards import Cards
from exactmoe.parallel.dispatch import Answer, Message, Program, Wire, exchange
from exactmoe.parallel.placement import Placed, place

__all__ = ["Answer", "Cards", "Message", "Placed", "Program", "Wire", "exchange", "place"]
