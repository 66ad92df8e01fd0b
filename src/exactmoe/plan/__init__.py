"""Which path runs, and why: pure data, no device work."""

from exactmoe.plan.choose import Plan, Rejected, choose
from exactmoe.plan.explain import Explanation, explain

__all__ = ["Explanation", "Plan", "Rejected", "choose", "explain"]
