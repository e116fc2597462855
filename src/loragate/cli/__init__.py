"""The command line: one file per subcommand. It knows every room; no room knows it."""
