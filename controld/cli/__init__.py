"""The command line: one file a command; data planes add theirs by the entry point group `controld.commands`."""
