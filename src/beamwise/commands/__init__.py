"""The subcommands of the command line, one module each: a dataclass of options and a function that takes it."""
