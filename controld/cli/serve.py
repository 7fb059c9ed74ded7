"""`controld serve`: the daemon in the foreground, as a service manager wants it."""

from __future__ import annotations

import gc
import os
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controld.config import Config

SUMMARY = "run the daemon"
EXAMPLES = """\
examples:
  controld serve                              with the settings file that is found
  controld serve --config etc/controld.yaml   with this one
  kill -HUP PID                               read the policies again (controld reload --wait says what came of it)

Ends on SIGTERM and SIGINT. Under systemd it reports readiness, reloads and a watchdog (Type=notify).
"""


def configure(parser: ArgumentParser) -> None:
    del parser


def run(arguments: Namespace) -> int:
    # Imports make a hundred thousand objects that stay: looking for garbage among them takes a third of the start.
    gc.disable()
    from controld.config import find_config_file, load_config
    from controld.obs.logs import configure_logging

    config = load_config(find_config_file(arguments.config))
    configure_logging(config.log_format, config.log_level)

    import uvloop

    uvloop.run(_serve(config))
    return 0


async def _serve(config: Config) -> None:
    from controld.composition import build_daemon
    from controld.systemd import Notifier

    # Built inside the loop: parts that make locks and queues need it running.
    daemon = build_daemon(config, Notifier.from_environment(os.environ))
    gc.freeze()
    gc.enable()
    await daemon.run()
