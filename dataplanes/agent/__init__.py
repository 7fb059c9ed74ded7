"""The library inside a data plane that talks to controld: draws arms, reports effects, keeps the last known good."""

from dataplanes.agent.agent import ADDRESS_VARIABLE, Agent, AgentState, address_from_environment
from dataplanes.agent.draw import Draw, RawReason
from dataplanes.agent.identity import AgentIdentity, AgentTiming
from dataplanes.agent.video_agent import VideoAgent

__all__ = [
    "ADDRESS_VARIABLE",
    "Agent",
    "AgentIdentity",
    "AgentState",
    "AgentTiming",
    "Draw",
    "RawReason",
    "VideoAgent",
    "address_from_environment",
]
