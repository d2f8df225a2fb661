"""What mixes tokens: one file a mixer, with its options and its first weights."""
