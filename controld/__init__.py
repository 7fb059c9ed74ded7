"""controld: the control-plane daemon that decides how inference state is compressed on its way between machines."""

__version__ = "0.1.0"
