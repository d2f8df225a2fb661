"""The files of a run.

metadata.py     what a checkpoint says of itself, and its files' names
checkpoint.py   written beside and renamed, verified when read
folder.py       what else lies in its folder, and runs that go on
init_from.py    a new run from the weights of another
restore.py      from a checkpoint back to what samples and scores need
hub.py          networks alone: saved, loaded, pushed
posthoc_ema.py  averaged weights of any width, from snapshots of two
"""
