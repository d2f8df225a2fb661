"""The tests, as a regular package: a dependency's package `tests` would hide a plain folder."""
