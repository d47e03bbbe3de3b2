"""The conformance kit on every built-in policy, with default options and with others."""

from __future__ import annotations

from hexllm.core.plugins import load_plugins
from hexllm.core.settings import PluginSettings
from hexllm.plugins.schedulers.fair import FairShare
from hexllm.plugins.schedulers.fair import Options as FairOptions
from hexllm.plugins.schedulers.fcfs import FirstComeFirstServed
from hexllm.plugins.schedulers.priority import UrgentFirst
from hexllm.plugins.schedulers.sjf import Options as SjfOptions
from hexllm.plugins.schedulers.sjf import ShortestFirst
from hexllm.testing import SchedulingPolicyTests


class TestFcfs(SchedulingPolicyTests):
    policy = FirstComeFirstServed


class TestPriority(SchedulingPolicyTests):
    policy = UrgentFirst


class TestFair(SchedulingPolicyTests):
    policy = FairShare
    options = FairOptions()


class TestFairWithShares(SchedulingPolicyTests):
    policy = FairShare
    options = FairOptions(by="user", shares={"ann": 4.0, "crowd": 0.25}, output_weight=9.0)


class TestSjf(SchedulingPolicyTests):
    policy = ShortestFirst
    options = SjfOptions()


class TestSjfThatAgesFast(SchedulingPolicyTests):
    policy = ShortestFirst
    options = SjfOptions(ageing=1e6)


def test_none_is_left_out() -> None:
    offered = {(type(entry.build()).__name__) for entry in load_plugins(PluginSettings()).policies}
    proved = {kit.policy.__name__ for kit in SchedulingPolicyTests.__subclasses__()}
    assert offered <= proved
