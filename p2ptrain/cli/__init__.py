"""The command line: one file per command, no logic. Heavy packages are imported only when a command runs."""
