"""The command line. It starts fast: torch is imported by the script that is run, never here."""
