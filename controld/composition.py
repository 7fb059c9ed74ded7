"""Which parts the daemon is made of: the one place where they are put together."""

from __future__ import annotations

from controld.config import Config
from controld.contract.clock import SystemClock
from controld.daemon import Daemon
from controld.policy.last_good import LastGoodFile
from controld.policy.source import PolicySource
from controld.systemd import Notifier


def build_daemon(config: Config, notifier: Notifier) -> Daemon:
    """A daemon that is ready to run.

    Raises:
        PolicyErrors: the policies are refused and nothing good was kept.
    """
    policy_source = PolicySource(config.policy.directory, LastGoodFile(config.state_dir / "last_good_policies.json"))
    policy_source.load_initial()
    return Daemon(config, policy_source, (), SystemClock(), notifier)
