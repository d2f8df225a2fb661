"""Mixers of tokens: one file per mixer, with its options and initial weights."""
