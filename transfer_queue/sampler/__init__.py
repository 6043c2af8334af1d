"""Samplers: which of the rows that are ready a fetch gets. They run in the controller, chosen by name.

tq.init({"controller": {"sampler": "GRPOGroupNSampler"}})
tq.init({"controller": {"sampler": {"name": "mine.sampling:NewestFirst", "n": 3}}})
"""

from transfer_queue.sampler.base import BaseSampler, PartitionView, SequentialSampler
from transfer_queue.sampler.grpo import GRPOGroupNSampler
from transfer_queue.sampler.loading import load_sampler, sampler_spec
from transfer_queue.sampler.priority import PrioritySampler, WeightedSampler
from transfer_queue.sampler.ranks import RankAwareSampler, SeqlenBalancedSampler

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "PartitionView",
    "PrioritySampler",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "WeightedSampler",
    "load_sampler",
    "sampler_spec",
]
