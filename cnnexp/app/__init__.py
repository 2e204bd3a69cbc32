"""The command line: config, runs, sweeps and commands, put together from everything below."""
