"""The command line: the commands, without logic. Heavy packages are imported only when a command runs."""
