"""The gRPC server that data planes attach to: sessions, snapshots with ACK and NACK, leases, effects, trials."""

from controld.fleet.delivery import Failure
from controld.fleet.published import Selector
from controld.fleet.server import FleetServer, FleetSettings
from controld.fleet.session import AgentSession

__all__ = ["AgentSession", "Failure", "FleetServer", "FleetSettings", "Selector"]
