"""Expert parallelism: experts divided among ranks, tokens sent to them, and the load balanced over all ranks."""

from weft.parallel.expert.expert_balance import ExpertBalance, balanced_routers, divide_sequences
from weft.parallel.expert.foreign_router import balance_routers
from weft.parallel.expert.spread import SpreadExperts, expect_experts, spread_experts

__all__ = [
    "ExpertBalance",
    "SpreadExperts",
    "balance_routers",
    "balanced_routers",
    "divide_sequences",
    "expect_experts",
    "spread_experts",
]
