"""The command line: one file per subcommand. It knows every room; of the others only `recipes` knows it, which runs commands."""
