"""Several cards: who runs what, what is sent, and what comes back."""

from exactmoe.parallel.cards import Cards
from exactmoe.parallel.dispatch import Answer, Message, Program, Vectors, Wire, exchange
from exactmoe.parallel.links import Link, Rate, link
from exactmoe.parallel.placement import Placed, place

__all__ = [
    "Answer",
    "Cards",
    "Link",
    "Message",
    "Placed",
    "Program",
    "Rate",
    "Vectors",
    "Wire",
    "exchange",
    "link",
    "place",
]
