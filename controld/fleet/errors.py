"""What the fleet server refuses."""

from __future__ import annotations

from controld.contract.errors import ControldError


class FleetError(ControldError):
    """A request of this process that the fleet cannot serve.

    Codes: `fleet.not_connected`, `fleet.address`, `fleet.resource_size`, `fleet.duplicate_resource`, `fleet.stopped`.
    """


class RejectError(ControldError):
    """An agent that is turned away; the code goes to it in `Reject`.

    Codes: `hello.missing`, `hello.timeout`, `hello.protocol`, `hello.field`, `hello.fenced`, `hello.full`,
    `hello.stopping`.
    """
