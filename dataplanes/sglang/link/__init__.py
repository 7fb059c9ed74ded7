"""A network link of chosen rate on one machine: a namespace behind a veth pair, shaped by `tbf`.

with ShapedLink() as link:
    link.set_rate(20_000_000)
    subprocess.run([*link.inside, "ip", "addr"])
"""

from dataplanes.sglang.link.privilege import LinkUnavailableError, enter_user_namespace_if_needed
from dataplanes.sglang.link.schedule import LinkPhase, parse_rate, parse_schedule
from dataplanes.sglang.link.shaped import LinkError, ShapedLink

__all__ = [
    "LinkError",
    "LinkPhase",
    "LinkUnavailableError",
    "ShapedLink",
    "enter_user_namespace_if_needed",
    "parse_rate",
    "parse_schedule",
]
