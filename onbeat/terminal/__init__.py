"""The output of commands in a terminal: tables, lines and live views."""
